-- confirm: the message is published, so a pending task becomes available, and what it stands in
-- for is over. Nothing else is touched and nothing is created: this may arrive after the start, or after the end.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 lease, from the ETA where there is one (times in ms)
-- Returns  1 confirmed, 0 no effect (one way: nobody reads it)
local field, lease = "t:" .. ARGV[2], tonumber(ARGV[3])

local task = record[field]
if not task or task[STATE] ~= "p" then return 0 end
task[STATE], task[LEASE] = "w", math.max(now, task[ETA]) + lease
write(field, task)
finalise(ARGV[2], now + lease)
stop_following(ARGV[2])  -- it was promoted: its message is out
look_after()
return 1
