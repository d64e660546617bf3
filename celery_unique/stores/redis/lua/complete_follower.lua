-- complete_follower: remove a follower that has its result.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 id of the follower (times in ms)
-- Returns  1 removed, 0 there was none
local offset, id = ARGV[1] + 0, ARGV[2]
-- @include entries
-- @include record
-- @include follower_groups

if not follower(id) then return 0 end
stop_following(id)
set_due_time()
return 1
