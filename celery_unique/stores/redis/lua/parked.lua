-- parked: return the ids of the parked calls, the next one first. Reads only.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset (times in ms)
-- Returns  ids
local offset = ARGV[1] + 0
-- @include entries
-- @include record

local found, lane = {}, following and following.q
for number = lane and lane.f or 1, lane and lane.l or 0 do
  local id = redis.call("HGET", followers_key, "\n" .. number)
  if id then found[#found + 1] = id end
end
return found
