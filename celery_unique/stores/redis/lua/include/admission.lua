-- admission: whether a call is admitted. Returns the task that blocks it; else leaves to the script
-- what is created.
--
-- Expects  as blockers, and put_receipt(reply)
-- Defines  as blockers; after (field of the task that it comes after, or nil), waiting (fields of those
--          that it replaces), and values of the new task: ends, eta, since, flags
-- @include blockers
local replaces = strategy == "replace" or strategy == "replace_except_schedule"
local itself = own and not own[STATE]:find("[cdx]")
if queues or limit > 1 then
  -- @include beyond_limit
end
local function first(task) return task[SINCE] > 0 and task[SINCE] or task[CREATED] end
local after = not itself and not final and (caller or (strategy == "rerun" and active)) or nil
-- Postponed for max_wait: otherwise calls could replace it forever in a slow queue.
if replaces and max_wait > 0 and not (itself or final or active) then
  for at, field in ipairs(waiting) do
    local task = record[field]
    local due = task[STATE] ~= "t" and task[ETA] <= now
    if due and first(task) + max_wait <= now then
      after = table.remove(waiting, at)
      break
    end
  end
end
if itself or final or (newest and not after and not (replaces and not active)) then
  local found = itself and "t:" .. id or final or active or newest
  local holder = record[found]
  holder[DUPLICATES], holder[LAST] = holder[DUPLICATES] + 1, now
  redis.call("HSET", key, found, packed(holder, shared_name))  -- its expiry does not change
  local tolerant = strategy == "ignore" or strategy == "rerun"
  -- Other work behind the same idempotency key has no result for this call.
  local follows = message ~= "" and tolerant and not itself and found ~= "t:" .. id
    and holder[ARGUMENTS] == arguments
  if not follows then return blocked_by(found:sub(3), "") end
  if holder[STATE]:find("[cdx]") and not holder[FLAGS]:find("e") then
    return blocked_by(found:sub(3), "ended")
  end
  attach(id, found:sub(3), {"", now, name, keep, kept, arguments}, message)
  return blocked_by(found:sub(3), "joined")
end

local ends, eta, since = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0, 0
if #waiting > 0 then
  local schedule = 0
  for _, field in ipairs(waiting) do
    local task = record[field]
    if since == 0 or first(task) < since then since = first(task) end
    if task[ETA] > now then schedule = task[ETA] end
  end
  if strategy == "replace_except_schedule" and schedule > 0 then eta = schedule end
  if max_wait > 0 and eta > since + max_wait then
    eta = since + max_wait > now and since + max_wait or 0
  end
end
-- An older message of this id may still arrive: drop the mark, record that there may be two.
local flags = in_canvas .. ((own or mark) and "m" or "")
