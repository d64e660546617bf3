-- prelude: stands before every act, behind the entries, and reads the record of the key.
--
-- KEYS[2]  the followers, while there are any: a hash with a field per id
-- KEYS[3]  the bucket's due set: keys with followers by the time at which they are due
-- Gives    record (field -> values, without what has lapsed), following, last_token, write, expire,
--          in_limbo, stands_in_for, finalise, bring_back
local NUMBERS = {[6] = 0, [7] = 0, [9] = 0, [10] = 0, [12] = 0, [18] = 0, [19] = 0}
local KEPT = 604800000  -- how long followers are kept beyond the time at which they are due
local record, lapsed, following, shared_name, last_token = {}, {}, nil, nil, 0

-- Given only the record, as in a cluster that is moving the slot: no key may be named there that
-- does not exist. It will do, unless the key has followers.
if not KEYS[2] then
  for i = 1, #stored, 2 do
    if stored[i] == "f" then return redis.error_reply("FOLLOWED all three keys are needed") end
  end
end

for i = 1, #stored, 2 do
  local field, values = stored[i], nil
  if field == "n" then
    shared_name = stored[i + 1]
  elseif field == "token" then
    last_token = tonumber(stored[i + 1])
  else
    values = cjson.decode(stored[i + 1])
  end
  if values and values[LEASE] then values[LEASE] = values[CREATED] + values[LEASE] end
  if field == "f" then
    following = values
  elseif values and (values[LEASE] or values[2]) > now then
    for n = values[LEASE] and #values + 1 or HELD + 1, HELD do values[n] = NUMBERS[n] or "" end
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
  return expire_at(latest)
end

-- Write one entry, or forget it (nil).
local function write(field, values)
  record[field] = values
  if values then
    if values[LEASE] and not shared_name then
      shared_name = values[NAME]
      redis.call("HSET", key, "n", shared_name)
    end
    redis.call("HSET", key, field, packed(values, shared_name))
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
    local task, own = record["t:" .. over[n]], record["t:" .. id]
    if task[STATE] ~= "r" then
      -- In a canvas: it will follow, so that the result must be stored before this record goes.
      if task[FLAGS]:find("[cf]") and not own[FLAGS]:find("f") then
        own[FLAGS] = own[FLAGS] .. "f"
        write("t:" .. id, own)
      end
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
