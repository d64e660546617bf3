-- start: the gate. May this delivery run its body now?
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks, where it may have one
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 task name, 5 lease, 6 delivery lease;
--          from the header, for a record that is lost: 7 created_at or 0, 8 window or 0,
--          9 letters of the final states to keep, 10 arguments; 11 how long the marks of
--          the tasks that it replaces stay (times in ms)
-- Returns  the token, or {"run", token, 1 when no live record was found else 0}, with its payload as the
--          fourth where it has one; {"wait"}, {"wait", how long in any case}, {"done"}, {"keys"}: name
--          the payloads,
--          {"superseded", kind of the mark, id that replaced it or ""}
local offset, id, delivery, name = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local lease, run_lease, created, window = ARGV[5] + 0, ARGV[6] + 0, ARGV[7], ARGV[8]
local keep, arguments, mark_for = ARGV[9], ARGV[10], ARGV[11]
-- @include stored
local field = "t:" .. id

-- Fast path, before the first function: the task is the only one, waits, and has only the values that
-- every task has, as nearly every task. Its text is written as cjson would.
if #stored == 4 and stored[1] == "n" and stored[3] == field and not delivery:find('[%c"\\]') then
  local since, held_for = stored[4]:match('^%[1,"w",(%d+),(%d+)%]$')
  if since and since + held_for > now then
    local token = clock[1] * 1000000 + clock[2] + offset * 1000
    local text = string.format("%.0f", token)  -- tostring keeps 14 digits, it has 16
    redis.call("HSET", key, "token", text, field, '[1,"r",' .. since .. "," .. now + lease - since
      .. ',"",0,0,"",0,0,"' .. delivery .. '",' .. now + run_lease .. ',"' .. text .. '"]')
    redis.call("PEXPIREAT", key, now + lease - math.min(offset, 0))
    return token
  end
end

created, window, mark_for = created + 0, window + 0, mark_for + 0
-- The same for any task that is the only one, and that no delivery has started.
-- @include single_task
-- @include packing
-- @include fill_up
if single and single_field == field and (single[DELIVERY] or "") == ""
  and single[STATE]:find("[pwt]") then
  local last_token = 0
  for i = 1, #stored, 2 do
    if stored[i] == "token" then last_token = tonumber(stored[i + 1]) end
  end
  local token = math.max(last_token + 1, clock[1] * 1000000 + clock[2] + offset * 1000)
  local text = string.format("%.0f", token)  -- cjson and tostring keep 14 digits, it has 16
  fill_up_to(TOKEN)
  single[STATE], single[LEASE], single[TOKEN] = "r", now + lease - single[CREATED], text
  single[DELIVERY], single[DELIVERY_LEASE] = delivery, now + run_lease
  if single[HELD] then
    single[HELD] = 0
    for n = #single, TOKEN + 1, -1 do
      if single[n] ~= "" and single[n] ~= 0 then break end
      single[n] = nil
    end
  end
  redis.call("HSET", key, "token", text, single_field, cjson.encode(single))
  expire_at(now + lease)
  return {"run", token, 0}
end

-- Full path.
-- @include record
-- @include follower_groups
local payloads_key = KEYS[5]
local task, mark = record[field], mark_of(id)
if mark then
  return mark[1] == "done" and {"done"} or {"superseded", kind_of(mark), mark[3] or ""}
end
local merges = task and task[FLAGS]:find("p") or (not task and payloads_key)
if merges and not payloads_key then return {"keys"} end
local text_of, keep_for_later = nil, nil
if merges then
  -- @include payload
  text_of, keep_for_later = payload_text, keep_payload
end
if task then
  local ending = task[FLAGS]:find("e")
  if task[STATE]:find("[cdx]") and not task[FLAGS]:find("[ej]") then return {"done"} end
  if task[DELIVERY] == delivery then
    local text = merges and text_of(id) or nil
    return ending and {"done"} or {"run", tonumber(task[TOKEN]) or 0, 0, text}
  end
  local others = task[DELIVERY] ~= ""
  local alive = others and task[DELIVERY_LEASE] > now
  local before = record["t:" .. task[AFTER]]
  local succeeds = before and not before[STATE]:find("[cdx]") and not before[FLAGS]:find("o")
  if not alive and (in_limbo(task) or succeeds) then return {"wait"} end
  if others and not task[FLAGS]:find("m") then
    task[FLAGS] = task[FLAGS] .. "m"  -- the other delivery's message may be redelivered
    if alive then write(field, task) end
  end
  if alive then return {"wait"} end
  -- Calls have postponed it.
  if merges and task[STATE]:find("[pw]") and task[ETA] > now then return {"wait", task[ETA] - now} end
end

-- A task whose record lapsed or was lost is never dropped: it was admitted before.
local lost, payload = task == nil and 1 or 0, merges and text_of(id) or ""
if created == 0 then created = now end
local ends = window > 0 and created + window or 0
-- This may be a start that timed out and arrived after the task's end: it stays only if renewed.
if lost == 1 then lease = run_lease end
task = task or {1, "r", created, 0, name, ends, 0, keep, 0, 0, "", 0, "", "", "", "", arguments,
  0, 0}
local token = math.max(last_token + 1, clock[1] * 1000000 + clock[2] + offset * 1000)
task[STATE], task[LEASE], task[BY], task[AFTER] = "r", now + lease, "", ""
task[DELIVERY], task[DELIVERY_LEASE], task[HELD] = delivery, now + run_lease, 0
task[FLAGS] = task[FLAGS]:gsub("[ej]", "")
if lost == 1 and payload ~= "" then task[FLAGS] = task[FLAGS] .. "p" end
task[TOKEN] = string.format("%.0f", token)  -- cjson and tostring keep 14 digits, it has 16
redis.call("HSET", key, "token", task[TOKEN])
write(field, task)
finalise(id, now + mark_for)
stop_following(id)  -- it runs itself
set_due_time()
if payload == "" then return {"run", token, lost} end
keep_for_later(id, task)
return {"run", token, lost, payload}
