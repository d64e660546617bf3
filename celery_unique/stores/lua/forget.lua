-- forget: the message that a mark was waiting for was reached and dropped.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set
-- ARGV     1 clock offset, 2 task id (times in ms)
-- Returns  1 forgotten, 0 there was none (one way: nobody reads it)
local field = "m:" .. ARGV[2]

if not record[field] then return 0 end
write(field, nil)
return 1
