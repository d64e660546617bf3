-- give_back: the publish failed, so the pending task is removed and its id marked withdrawn.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 how long the mark stays (times in ms)
-- Returns  1 removed, 0 kept: not pending, or a copy of its message was published
local offset, id, mark_for = ARGV[1] + 0, ARGV[2], ARGV[3] + 0
-- @include entries
-- @include record
-- @include follower_groups

local task = record["t:" .. id]
if not task or task[STATE] ~= "p" or task[FLAGS]:find("m") then return 0 end
-- The publish failed, but the message may have arrived: the gate must drop it.
put_mark(id, {"withdrawn", now + mark_for})
restore_replaced(id, now + mark_for)
write("t:" .. id, nil)
set_due_time()
return 1
