-- start: the gate. May this delivery run its body now?
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 task name, 5 lease, 6 delivery lease;
--          from the header, for a record that is lost: 7 created_at or 0, 8 window or 0,
--          9 letters of the final states to keep, 10 arguments; 11 how long the marks of
--          what it stands in for stay (times in ms)
-- Returns  {"run", token, 1 when no live record was found else 0}, {"wait"}, {"done"},
--          {"superseded", kind of the mark, id that took its place or ""}
local id, delivery, name = ARGV[2], ARGV[3], ARGV[4]
local lease, run_lease, created = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local window, keep, arguments, mark_for = tonumber(ARGV[8]), ARGV[9], ARGV[10], tonumber(ARGV[11])

local task, mark = record["t:" .. id], mark_of(id)
if mark then return mark[1] == "done" and {"done"} or {"superseded", mark[1], mark[3] or ""} end
if task then
  local ending = task[FLAGS]:find("e")
  if task[STATE]:find("[cdx]") and not task[FLAGS]:find("[ej]") then return {"done"} end
  if task[DELIVERY] == delivery then
    return ending and {"done"} or {"run", tonumber(task[TOKEN]) or 0, 0}
  end
  local others = task[DELIVERY] ~= ""
  local alive = others and task[DELIVERY_LEASE] > now
  local before = record["t:" .. task[AFTER]]
  local succeeds = before and not before[STATE]:find("[cdx]") and not before[FLAGS]:find("o")
  if not alive and (in_limbo(task) or succeeds) then return {"wait"} end
  if others and not task[FLAGS]:find("m") then
    task[FLAGS] = task[FLAGS] .. "m"  -- the other delivery's message may come back
    if alive then write("t:" .. id, task) end
  end
  if alive then return {"wait"} end
end

-- A task whose record lapsed or was lost is never dropped: it was admitted once.
local lost = task == nil and 1 or 0
if created == 0 then created = now end
local ends = window > 0 and created + window or 0
-- It may be a start that timed out and came after the task's end: it stays only if it is renewed.
if lost == 1 then lease = run_lease end
task = task or {1, "r", created, 0, name, ends, 0, keep, 0, 0, "", 0, "", "", "", "", arguments,
  0, 0}
local token = math.max(last_token + 1, clock[1] * 1000000 + clock[2] + offset * 1000)
task[STATE], task[LEASE], task[BY], task[AFTER] = "r", now + lease, "", ""
task[DELIVERY], task[DELIVERY_LEASE], task[HELD] = delivery, now + run_lease, 0
task[FLAGS] = task[FLAGS]:gsub("[ej]", "")
task[TOKEN] = string.format("%.0f", token)  -- cjson and tostring keep 14 digits, it has 16
redis.call("HSET", key, "token", task[TOKEN])
write("t:" .. id, task)
finalise(id, now + mark_for)
stop_following(id)  -- it runs itself
look_after()
return {"run", token, lost}
