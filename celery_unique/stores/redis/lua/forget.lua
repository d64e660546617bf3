-- forget: the message that a mark was waiting for has arrived and was dropped.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id (times in ms)
-- Returns  1 removed, 0 there was none, or it is still needed (fire-and-forget: the reply is not used)
local offset, id = ARGV[1] + 0, ARGV[2]
-- @include entries
-- @include record
-- @include follower_groups

local mark = mark_of(id)
if not mark or is_lasting(mark) then return 0 end
-- A call that had its turn, and was revoked or withdrawn, may be published again: the reaper and
-- its second message need the mark.
local task = record["t:" .. id]
if holder_of(id) == id or (task and task[FLAGS]:find("m")) then return 0 end
drop_mark(id)
return 1
