-- followers: return the followers of a task, or of any task of the key. Reads only.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 id of the holder, or "" for all (times in ms)
-- Returns  {id, id of its holder, its stored value, and so on for the next}, in no order
local offset, holder = ARGV[1] + 0, ARGV[2]
-- @include entries
-- @include record
-- @include follower_groups

local found, all = {}, following and redis.call("HGETALL", followers_key) or {}
for i = 1, #all, 2 do
  local id, facts = all[i], all[i]:sub(1, 1) ~= "\n" and unpacked(all[i + 1])
  local followed = facts and not facts[PARKED] and holder_of(id, facts)  -- the others are parked
  if followed and (holder == "" or (followed == holder and id ~= holder)) then
    found[#found + 1], found[#found + 2], found[#found + 3] = id, followed, all[i + 1]
  end
end
return found
