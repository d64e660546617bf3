-- followers: return the followers of a task, or of any task of the key. Reads only.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 id of the holder, or "" for all (times in ms)
-- Returns  {id, id of its holder, its stored value, and so on for the next}, in no order
local offset, holder = ARGV[1] + 0, ARGV[2]
-- @include entries
-- @include record
-- @include follower_groups
-- @include members

local found, groups = {}, {}
if not following then return found end
for name, group in pairs(following.g) do
  if holder == "" or group[1] == holder then groups[name] = true end
end
for _, each in ipairs(members(groups, holder == "" and following.p or {})) do
  local id, facts, value = unpack(each)
  if id ~= holder then
    found[#found + 1], found[#found + 2], found[#found + 3] = id, holder_of(id, facts), value
  end
end
return found
