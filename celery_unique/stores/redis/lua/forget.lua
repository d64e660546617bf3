-- forget: the message that a mark was waiting for was reached and dropped.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id (times in ms)
-- Returns  1 forgotten, 0 there was none (one way: nobody reads it)
if not mark_of(ARGV[2]) then return 0 end
drop_mark(ARGV[2])
return 1
