-- following: stands between the prelude and an act that may touch followers.
--
-- A field of KEYS[2] is a line of JSON and the message: group or "" once it is promoted, when it
-- joined, task name, letters of the final states to keep, how long they are kept, arguments.
-- Gives    GROUP, JOINED, and the functions below. Nearly always there is nobody who follows or
--          would: then they do nothing and are not even made, which takes a few microseconds.
local GROUP, JOINED = 1, 2
local function nobody() end
local unpacked, follower, holder_of, orphaned_at = nobody, nobody, nobody, nobody
local look_after, leave_group, join_group, follow_instead = nobody, nobody, nobody, nobody
local move, stop_following, attach, is_followed = nobody, nobody, nobody, nobody

if following or (ARGV[14] or "") ~= "" then  -- ARGV[14]: the message of a call that would join
  -- The facts and the message of a follower; nil for none.
  unpacked = function(value)
    local line = value:find("\n", 1, true)
    return cjson.decode(value:sub(1, line - 1)), value:sub(line + 1)
  end
  follower = function(id)
    local value = following and redis.call("HGET", KEYS[2], id)
    if value then return unpacked(value) end
    return nil
  end

  -- Whom it follows: itself, once it is promoted; nil for nobody.
  holder_of = function(id, facts)
    facts = facts or follower(id)
    if not facts then return nil end
    if facts[GROUP] == "" then return id end
    return (following.g[facts[GROUP]] or {})[1]
  end

  -- Until when a task is sure to be there for its followers; now, if it is not.
  orphaned_at = function(id)
    local task = record["t:" .. id]
    if not task then return now end
    local runs = task[DELIVERY] ~= "" and math.max(now, task[DELIVERY_LEASE]) or now
    if task[FLAGS]:find("e") then return math.min(task[LEASE], runs) end
    if task[STATE]:find("[cdx]") then return now end
    -- An operator let go of it, perhaps for its message is lost: unless it runs, nobody waits.
    return task[FLAGS]:find("o") and math.min(task[LEASE], runs) or task[LEASE]
  end

  -- Set when somebody should look after the followers: at the first moment at which one of them
  -- may have lost its holder. Not for a longer lease: an early look finds the holder alive.
  look_after = function()
    if not following then return nil end
    if not next(following.g) and not next(following.p) then
      following = nil
      redis.call("HDEL", key, "f")
      redis.call("DEL", KEYS[2])
      redis.call("ZREM", KEYS[3], key)
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
    redis.call("HSET", key, "f", cjson.encode(following))
    redis.call("PEXPIREAT", KEYS[2], following.d + KEPT - math.min(offset, 0))
    redis.call("ZADD", KEYS[3], following.d, key)
    return expire()
  end

  leave_group = function(id, facts)
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
    redis.call("HSET", KEYS[2], id, cjson.encode(facts) .. "\n" .. message)
  end

  -- All who followed the one follow the other.
  follow_instead = function(holder, other)
    for _, group in pairs(following.g) do
      if group[1] == holder then group[1] = other end
    end
  end

  -- One follower alone follows another task; it may have been promoted before.
  move = function(id, holder)
    local facts, message = follower(id)
    if not facts then return end
    leave_group(id, facts)
    join_group(id, holder, facts, message)
  end

  -- It has its result, or is on its own: a task that is published, runs or has ended.
  stop_following = function(id)
    local facts = follower(id)
    if not facts then return end
    redis.call("HDEL", KEYS[2], id)
    leave_group(id, facts)
  end

  -- The call follows the holder, whomever it followed before.
  attach = function(id, holder, facts, message)
    stop_following(id)
    following = following or {d = 0, r = "", u = 0, g = {}, p = {}}
    join_group(id, holder, facts, message)
    look_after()
  end

  is_followed = function(id)
    for _, group in pairs(following and following.g or {}) do
      if group[1] == id then return true end
    end
    return false
  end
end
