-- give_back: the publish failed, so the pending task is forgotten and its id marked withdrawn.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 how long the mark stays (times in ms)
-- Returns  1 removed, 0 kept: not pending, or a copy of its message was published
local id, mark_for = ARGV[2], tonumber(ARGV[3])

local task = record["t:" .. id]
if not task or task[STATE] ~= "p" or task[FLAGS]:find("m") then return 0 end
-- The publish raised, yet it may have landed: the gate must drop that message.
put_mark(id, {"withdrawn", now + mark_for})
bring_back(id, now + mark_for)
write("t:" .. id, nil)
look_after()
return 1
