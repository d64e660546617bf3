-- lanes: functions for calls that are parked under the key, and called in the order of admission.
--
-- following.q      f: number of the oldest, or a smaller one; l: the number given last; n: how many are
--                  parked; c: id and number of those that were called and are not confirmed
-- followers_key    a parked call is a follower without a group; its seventh fact is {number, letters
--                  of its states, window, limit, grace, ETA or 0, flags of its task}. Beside it the
--                  field "\n" and its number, with its id
-- Expects  record, and to be in follower_groups, behind its functions
-- Defines  is_parked, lane_waits, park, call_parked, unconfirmed, leave_lane, lane_due
local function parked_as(id)
  local facts, message = follower(id)
  return facts and facts[PARKED], facts, message
end
is_parked = function(id) return following ~= nil and following.q ~= nil and parked_as(id) ~= nil end

-- The tasks that block the call.
local function blocking(parked)
  local states, window, found = parked[2], parked[3], {}
  for _, task in pairs(record) do
    if task[LEASE] and not task[FLAGS]:find("o")
      and not (window > 0 and task[CREATED] + window <= now) then
      local waiting = task[ETA] > now and "s" or "w"
      local counts = task[STATE] == "p" and "p" .. waiting or task[STATE] == "w" and waiting
        or task[STATE]
      if states:find("[" .. counts .. "]") and not in_limbo(task) then found[#found + 1] = task end
    end
  end
  return found
end

-- When fewer tasks than its limit will block the call, if nothing happens until then.
local function free_at(parked)
  local window, limit, times = parked[3], parked[4], {}
  for n, task in ipairs(blocking(parked)) do
    local ends = window > 0 and task[CREATED] + window or task[LEASE]
    times[n] = math.min(task[LEASE], ends)
  end
  if #times < limit then return now end
  table.sort(times)
  return times[#times - limit + 1]
end

-- When a worker is to check that the messages of tasks that block the call are not lost: after a
-- minute, and again whenever they have waited for twice as long.
local function look_at(parked)
  local due = math.huge
  for _, task in ipairs(blocking(parked)) do
    if task[STATE]:find("[wt]") then
      local since = math.max(task[CREATED], task[ETA])
      due = math.min(due, math.max(now, since) + math.max(60000, now - since))
    end
  end
  return due
end

-- The call whose turn it is: first one that was called before, and whose grace has passed.
local function next_parked()
  local lane, found, first = following and following.q, nil, nil
  if not lane then return nil end
  for id, number in pairs(lane.c) do
    if not record["t:" .. id] then
      if not parked_as(id) then
        lane.c[id] = nil  -- the server has evicted it
      elseif not first or number < first then
        found, first = id, number
      end
    end
  end
  if found then return found end
  while lane.n > 0 and lane.f <= lane.l do
    local id = redis.call("HGET", followers_key, "\n" .. lane.f)
    if id and parked_as(id) then return id end
    lane.f = lane.f + 1  -- it has left the lane
  end
  lane.n = 0
  return nil
end

-- Whether calls wait, which a new one must not overtake.
lane_waits = function()
  local lane = following and following.q
  if not lane then return false end
  for id in pairs(lane.c) do
    if not record["t:" .. id] then return true end
  end
  return lane.n > 0
end

-- It waits no more: it is published, withdrawn or revoked. Its own entry is changed elsewhere.
leave_lane = function(id, parked)
  local lane = following.q
  if not lane then return end
  if lane.c[id] then
    lane.c[id] = nil
  else
    redis.call("HDEL", followers_key, "\n" .. parked[1])
    lane.n = lane.n - 1
  end
  if lane.n <= 0 and not next(lane.c) then following.q = nil end
end

-- When the next one is to be called, or one again whose publish was not confirmed; nil for never.
lane_due = function()
  local lane, due = following.q, math.huge
  for id in pairs(lane.c) do
    local task = record["t:" .. id]
    if task then due = math.min(due, task[LEASE]) end
  end
  local id = next_parked()
  local parked = id and parked_as(id)
  if parked then due = math.min(due, free_at(parked), look_at(parked)) end
  if lane.n <= 0 and not next(lane.c) then following.q = nil end
  return due < math.huge and due or nil
end

-- Park the call behind all others.
park = function(id, facts, parked, message)
  following = following or {d = 0, r = "", u = 0, g = {}, p = {}}
  local lane = following.q or {f = 1, l = 0, n = 0, c = {}}
  lane.l, lane.n = lane.l + 1, lane.n + 1
  parked[1], facts[PARKED], following.q = lane.l, parked, lane
  redis.call("HSET", followers_key, id, cjson.encode(facts) .. "\n" .. message, "\n" .. lane.l, id)
end

-- Make tasks of the calls that have their turn, oldest first: {id, again, message, and so on}.
call_parked = function()
  local called, lane = {}, following and following.q
  while lane and #called < 60 do
    local id = next_parked()
    if not id then break end
    local parked, facts, message = parked_as(id)
    if free_at(parked) > now then break end
    local again, flags, kept, eta = lane.c[id] ~= nil, parked[7], facts[5], parked[6]
    -- Called again, its first message may have been published, too.
    if again and not flags:find("m") then flags = flags .. "m" end
    if not again then
      redis.call("HDEL", followers_key, "\n" .. parked[1])
      lane.f, lane.n, lane.c[id] = parked[1] + 1, lane.n - 1, parked[1]
    end
    -- Of the calls of one act, each is a millisecond younger than the one before.
    write("t:" .. id, {1, "p", now + #called / 3, now + parked[5], facts[3], kept > 0 and now + kept or 0,
      eta > now and eta or 0, facts[4], 0, 0, "", 0, "", flags, "", "", facts[6], 0, 0})
    called[#called + 1], called[#called + 2], called[#called + 3] = id, again and 1 or 0, message
  end
  return called
end

-- The calls that have their turn and are not confirmed, as call_parked: for a worker that may have
-- lost the reply with their messages. They may be published already.
unconfirmed = function()
  local ids, called, lane = {}, {}, following and following.q
  for id in pairs(lane and lane.c or {}) do ids[#ids + 1] = id end
  table.sort(ids, function(one, other) return lane.c[one] < lane.c[other] end)
  for _, id in ipairs(ids) do
    local task, facts, message = record["t:" .. id], follower(id)
    if task and task[STATE] == "p" and facts then
      if not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
      write("t:" .. id, task)
      called[#called + 1], called[#called + 2], called[#called + 3] = id, 1, message
    end
  end
  return called
end
