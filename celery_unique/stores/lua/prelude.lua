-- prelude: stands before every act, and reads the record of the key.
--
-- KEYS[1]  the record of the key: a hash with a field t:<id> per task, m:<id> per mark, token,
--          n, the name of its tasks, and f, while there are followers: when they are due, who looks after them, whom each
--          group follows and how many it has, who is promoted
-- KEYS[2]  the followers, while there are any: a hash with a field per id
-- KEYS[3]  the bucket's due set: keys with followers by the time at which they are due
-- ARGV[1]  clock offset in ms
-- Gives    now and stored (the fields in order), record (field -> values, without what has
--          lapsed), following, write, expire, in_limbo, stands_in_for, finalise, bring_back; the places of a task's values by name
local STATE, CREATED, LEASE, WINDOW_ENDS, ETA, KEEP, DUPLICATES, LAST = 2, 3, 4, 6, 7, 8, 9, 10
local DELIVERY, DELIVERY_LEASE, TOKEN, FLAGS, BY, AFTER, ARGUMENTS = 11, 12, 13, 14, 15, 16, 17
local NAME, SINCE = 5, 18
local NUMBERS = {[6] = 0, [7] = 0, [9] = 0, [10] = 0, [12] = 0, [18] = 0}
local KEPT = 604800000  -- how long followers are kept beyond the time at which they are due
local key, offset = KEYS[1], tonumber(ARGV[1])
local clock, stored, record = redis.call("TIME"), redis.call("HGETALL", key), {}
local now, lapsed = clock[1] * 1000 + math.floor(clock[2] / 1000) + offset, {}
local following

-- A mark has less than four values. A task's empty values at the end are not stored.
-- Its lease counts from its creation, and its name is that of the others, if empty. All this keeps
-- a value below the 64 bytes up to which Redis packs a hash tightly.
local shared_name
for i = 1, #stored, 2 do
  local field, values = stored[i], nil
  if field == "n" then
    shared_name = stored[i + 1]
  elseif field ~= "token" then
    values = cjson.decode(stored[i + 1])
  end
  if values and values[LEASE] then values[LEASE] = values[CREATED] + values[LEASE] end
  if field == "f" then
    following = values
  elseif values and (values[LEASE] or values[2]) > now then
    for n = values[LEASE] and #values + 1 or SINCE + 1, SINCE do values[n] = NUMBERS[n] or "" end
    record[field] = values
  elseif values then
    redis.call("HDEL", key, field)
    if values[LEASE] then lapsed[field:sub(3)] = values[BY] or "" end
  end
end
for _, task in pairs(record) do
  if task[LEASE] and task[NAME] == "" then task[NAME] = shared_name or "" end
  if task[NAME] == false then task[NAME] = "" end
end

if following and following.d + KEPT <= now then
  following = nil
  redis.call("HDEL", key, "f")
  redis.call("DEL", KEYS[2])
  redis.call("ZREM", KEYS[3], key)
end

-- The record expires with its latest deadline.
local function expire()
  local latest = following and following.d + KEPT or 0
  for _, each in pairs(record) do latest = math.max(latest, each[LEASE] or each[2]) end
  if latest == 0 then return redis.call("DEL", key) end
  return redis.call("PEXPIREAT", key, latest - math.min(offset, 0))
end

-- Write one entry, or forget it (nil).
local function write(field, values)
  record[field] = values
  if values then
    local last, packed = #values, {}
    for n = 1, last do packed[n] = values[n] end
    if values[LEASE] then
      packed[LEASE] = values[LEASE] - values[CREATED]
      if not shared_name then
        shared_name = values[NAME]
        redis.call("HSET", key, "n", shared_name)
      elseif values[NAME] == "" then
        packed[NAME] = false  -- no name at all, beside a task that has one
      end
      if values[NAME] == shared_name then packed[NAME] = "" end
    end
    while packed[last] == "" or (packed[last] == 0 and last > LEASE) do
      packed[last], last = nil, last - 1
    end
    redis.call("HSET", key, field, cjson.encode(packed))
  else redis.call("HDEL", key, field) end
  return expire()
end

-- A replacement that has lapsed leaves what it stood in for to its own, if any.
for field, task in pairs(next(lapsed) and record or {}) do
  if lapsed[task[BY]] then
    repeat task[BY] = lapsed[task[BY]] until not lapsed[task[BY]]
    write(field, task)
  end
end

-- Does a replacement that is not published yet stand in for the task?
local function in_limbo(task)
  while task[BY] ~= "" do
    local replacement = record["t:" .. task[BY]]
    if not replacement then return false end
    if not replacement[FLAGS]:find("o") then return true end
    task = replacement
  end
  return false
end

-- The ids of every task in limbo under this one, down the chain, after its own.
local function stands_in_for(id)
  local found, n = {id}, 1
  while found[n] do
    for i = 1, #stored, 2 do
      local task, other = record[stored[i]], stored[i]:sub(3)
      if task and task[BY] == found[n] and other ~= id then found[#found + 1] = other end
    end
    n = n + 1
  end
  return found
end

-- The task is published or runs: what it stands in for is over. Their messages are still out
-- there, so each leaves a mark for the gate.
local function finalise(id, mark_until)
  local over = stands_in_for(id)
  for n = 2, #over do
    local task = record["t:" .. over[n]]
    if task[STATE] ~= "r" then
      write("m:" .. over[n], {"superseded", math.max(task[LEASE], mark_until), id})
      write("t:" .. over[n], nil)
      for _, group in pairs(following and following.g or {}) do
        if group[1] == over[n] then group[1] = id end
      end
    end
  end
end

-- The replacement will not run: what it stood in for is back, or waits for the replacement's own.
local function bring_back(id, lease_until)
  local by = record["t:" .. id][BY]
  for i = 1, #stored, 2 do
    local field, task = stored[i], record[stored[i]]
    if task and task[BY] == id then
      task[BY] = by
      if by == "" and task[STATE]:find("[wt]") then
        task[LEASE] = math.max(task[LEASE], lease_until)
      end
      write(field, task)
    end
  end
end
