-- complete_follower: a follower has its result and is forgotten.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 id of the follower (times in ms)
-- Returns  1 forgotten, 0 there was none
if not follower(ARGV[2]) then return 0 end
stop_following(ARGV[2])
look_after()
return 1
