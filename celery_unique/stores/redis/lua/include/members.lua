-- members: the followers of groups. Parked calls, of which a lane can have very many, are read only if
-- one of these groups has a follower that is not its own holder.
--
-- Expects  follower_groups, and followers
-- Defines  members(groups, promoted): {id, facts, stored value} of each follower in one of these groups
--          (a set of names), and of these promoted ones (a set of ids), in no order
local function members(groups, promoted)
  local found, seen, left = {}, {}, 0
  local function add(id, value)
    local facts = value and id:sub(1, 1) ~= "\n" and not seen[id] and unpacked(value)
    if not facts or not (facts[GROUP] == "" and promoted[id] or groups[facts[GROUP]]) then return 0 end
    seen[id] = true
    found[#found + 1] = {id, facts, value}
    return 1
  end
  for id in pairs(promoted) do add(id, redis.call("HGET", followers_key, id)) end
  -- A revoked call is in a group of its own, and follows itself.
  for name in pairs(groups) do
    local holder, count = unpack(following.g[name])
    left = left + count - add(holder, redis.call("HGET", followers_key, holder))
  end
  local all = left > 0 and redis.call("HGETALL", followers_key) or {}
  for i = 1, #all, 2 do add(all[i], all[i + 1]) end
  return found
end
