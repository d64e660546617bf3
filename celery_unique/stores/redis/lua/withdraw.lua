-- withdraw: undo a publish without a reply. Its task is removed unless it has started or ended, or
-- other calls depend on it; a publish of the attempt that arrives later is refused.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the receipt of the attempt, 6 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 name of the attempt's mark, 4 how long marks stay (times in
--          ms)
-- Returns  "withdrawn", "active" (its task was not removed, or has ended)
local offset, id, attempt, mark_for = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4] + 0
local receipt, payloads_key = KEYS[5], KEYS[6]
-- @include entries
-- @include record
-- @include follower_groups
-- @include payload

local task, mark = record["t:" .. id], mark_of(id)
local pushed = redis.call("GET", receipt)
if not pushed then
  if mark_of(attempt) then return "withdrawn" end
  put_mark(attempt, {"withdrawn", now + mark_for})
  -- A task of another attempt, or the receipt has expired.
  return task and "active" or "withdrawn"
end
if not task and is_parked(id) then
  put_mark(attempt, {"withdrawn", now + mark_for})
  stop_following(id)
  set_due_time()
  return "withdrawn"
end
if not task then return mark and mark[1] ~= "done" and "withdrawn" or "active" end
local created = cjson.decode(pushed)
if type(created) == "table" then created = created[1] end
-- A call that was named this task, and one that it replaced, run by this task alone.
if task[CREATED] ~= created or task[STATE] ~= "w" or task[DUPLICATES] > 0 or task[SINCE] > 0 then
  return "active"
end
put_mark(id, {"withdrawn", now + mark_for})
put_mark(attempt, {"withdrawn", now + mark_for})
if task[FLAGS]:find("p") then drop_payload(id) end
write("t:" .. id, nil)
set_due_time()
return "withdrawn"
