-- follower_groups: functions for scripts that may change which task a follower follows.
--
-- A field of followers_key is a line of JSON and the message: group or "" once it is promoted, when
-- it joined, task name, letters of the final states to keep, how long they are kept, arguments; of a
-- parked call one more, see lanes.
-- Expects  record
-- Defines  GROUP, JOINED, and the functions below. Nearly every key has no followers and gets none:
--          then they do nothing and are not even created, which would take a few microseconds.
local GROUP, JOINED, PARKED = 1, 2, 7
local function nothing() end
local unpacked, follower, holder_of, orphaned_at = nothing, nothing, nothing, nothing
local set_due_time, leave_group, join_group, follow_instead = nothing, nothing, nothing, nothing
local move, stop_following, attach, is_followed = nothing, nothing, nothing, nothing
local is_parked, lane_waits, park, call_parked = nothing, nothing, nothing, nothing
local unconfirmed, leave_lane, lane_due = nothing, nothing, nothing

if following or joins then
  -- The facts and the message of a follower; nil for none.
  unpacked = function(value)
    local line = value:find("\n", 1, true)
    return cjson.decode(value:sub(1, line - 1)), value:sub(line + 1)
  end
  follower = function(id)
    local value = following and redis.call("HGET", followers_key, id)
    if value then return unpacked(value) end
    return nil
  end

  -- The id of the task that it follows; its own once it is promoted; nil for none.
  holder_of = function(id, facts)
    facts = facts or follower(id)
    if not facts then return nil end
    if facts[GROUP] == "" then return id end
    return (following.g[facts[GROUP]] or {})[1]
  end

  -- Until when a task is certain to serve its followers; now, if it is not.
  orphaned_at = function(id)
    local task = record["t:" .. id]
    if not task then return now end
    local runs = task[DELIVERY] ~= "" and math.max(now, task[DELIVERY_LEASE]) or now
    if task[FLAGS]:find("e") then return math.min(task[LEASE], runs) end
    if task[STATE]:find("[cdx]") then return now end
    -- Released by an operator, perhaps because its message is lost: it counts only while it runs.
    return task[FLAGS]:find("o") and math.min(task[LEASE], runs) or task[LEASE]
  end

  -- Set when a worker is to reap the followers: at the first moment at which one of them may have
  -- lost its holder. For a longer lease only if calls are parked: else an early reaper finds the
  -- holder alive.
  set_due_time = function()
    if not following then return nil end
    local call_at = following.q and lane_due()
    if not next(following.g) and not next(following.p) and not following.q then
      following = nil
      redis.call("HDEL", key, "f")
      redis.call("DEL", followers_key)
      redis.call("ZREM", due_key, key)
      return expire()
    end
    local earliest = math.huge
    for _, group in pairs(following.g) do earliest = math.min(earliest, orphaned_at(group[1])) end
    for id in pairs(following.p) do earliest = math.min(earliest, orphaned_at(id)) end
    if following.u > now and (earliest <= now or next(following.p)) then
      following.d = math.max(earliest, following.u)
    else
      following.d, following.r, following.u = earliest, "", 0
    end
    if call_at then following.d = math.min(following.d, call_at) end
    redis.call("HSET", key, "f", cjson.encode(following))
    redis.call("PEXPIREAT", followers_key, kept_until() - math.min(offset, 0))
    redis.call("ZADD", due_key, following.d, key)
    return expire()
  end

  leave_group = function(id, facts)
    if facts[PARKED] then leave_lane(id, facts[PARKED]) end
    local group = following.g[facts[GROUP]]
    following.p[id] = nil
    if group then
      group[2] = group[2] - 1
      if group[2] == 0 then following.g[facts[GROUP]] = nil end
    end
  end

  -- Store a follower in a group that follows the holder.
  join_group = function(id, holder, facts, message)
    local name, number = nil, 1
    for each, group in pairs(following.g) do
      if group[1] == holder and (not name or tonumber(each) < tonumber(name)) then name = each end
    end
    while not name do
      if not following.g[tostring(number)] then name = tostring(number) end
      number = number + 1
    end
    local group = following.g[name] or {holder, 0}
    following.g[name], group[2], facts[GROUP] = group, group[2] + 1, name
    redis.call("HSET", followers_key, id, cjson.encode(facts) .. "\n" .. message)
  end

  -- Let all followers of one task follow another.
  follow_instead = function(holder, other)
    for _, group in pairs(following.g) do
      if group[1] == holder then group[1] = other end
    end
  end

  -- Let one follower follow another task; it may have been promoted before.
  move = function(id, holder)
    local facts, message = follower(id)
    if not facts then return end
    leave_group(id, facts)
    facts[PARKED] = nil
    join_group(id, holder, facts, message)
  end

  -- It has its result, or is a task of its own that is published, runs or has ended.
  stop_following = function(id)
    local facts = follower(id)
    if not facts then return end
    redis.call("HDEL", followers_key, id)
    leave_group(id, facts)
  end

  -- Let the call follow the holder, whichever task it followed before.
  attach = function(id, holder, facts, message)
    stop_following(id)
    following = following or {d = 0, r = "", u = 0, g = {}, p = {}}
    join_group(id, holder, facts, message)
    set_due_time()
  end

  is_followed = function(id)
    for _, group in pairs(following and following.g or {}) do
      if group[1] == id then return true end
    end
    return false
  end

  if joins or following.q then
    -- @include lanes
  end
end

