-- give_back: the publish failed, so the pending task is removed and its id marked withdrawn.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 how long the mark stays,
--          4 how its line in a payload begins (times in ms)
-- Returns  1 removed, 0 kept: not pending, or a copy of its message was published, or will be by a call
--          that was merged into it
local offset, id, mark_for, line_head = ARGV[1] + 0, ARGV[2], ARGV[3] + 0, ARGV[4]
local payloads_key = KEYS[5]
-- @include entries
-- @include record
-- @include follower_groups
-- @include payload

local task = record["t:" .. id]
if not task or (task[STATE] ~= "p" and task[STATE] ~= "w") then return 0 end
if task[FLAGS]:find("p") and task[DUPLICATES] > 0 then
  remove_line(id, line_head)  -- its caller gets an error
  return 0
end
if task[STATE] == "w" or task[FLAGS]:find("m") then return 0 end
if task[FLAGS]:find("p") then drop_payload(id) end
-- The publish failed, but the message may have arrived: the gate must drop it.
put_mark(id, {"withdrawn", now + mark_for})
restore_replaced(id, now + mark_for)
write("t:" .. id, nil)
set_due_time()
return 1
