-- record: reads the whole record of the key, without what has lapsed. Included by every script,
-- behind its fast path.
--
-- KEYS[2]  the followers, while there are any: a hash with a field per id
-- KEYS[3]  the bucket's due set: keys with followers by the time at which they are due
-- KEYS[4]  the marks beside the record, while there are any: a hash with a field per id
-- Expects  entries
-- Defines  record (field -> values), following, joins, last_token, followers_key, due_key, write,
--          expire, mark_of, LASTING, is_lasting, kind_of, kind_for, put_mark, drop_mark, in_limbo,
--          replaced_by, finalise, restore_replaced
local MARKS_INLINE = 16  -- how many marks the record holds itself
local CHECKED = 3  -- marks beside it that each new one checks for expiry; more than one, to shrink
local NUMBERS = {[6] = 0, [7] = 0, [9] = 0, [10] = 0, [12] = 0, [18] = 0, [19] = 0}
local PARKED_KEPT = 2592000000  -- how long parked calls are kept, where followers are for KEPT
-- @include keeping
local followers_key, due_key = KEYS[2], KEYS[3]
local record, lapsed, following, shared_name, last_token = {}, {}, nil, nil, 0
local marks = 0
local joins = false  -- a script that may add a follower sets it before it includes follower_groups

-- While a cluster moves the slot, no key may be named that does not exist, and only some are given:
-- the record; the record and the marks beside it; or all but those marks. That is enough unless
-- more of this key is stored.
local beside = KEYS[4] or (#KEYS == 2 and KEYS[2]) or nil
if #KEYS < 4 then
  local followed, marked = false, false
  for i = 1, #stored, 2 do
    followed, marked = followed or stored[i] == "f", marked or stored[i] == "m:"
  end
  if (followed and #KEYS < 3) or (marked and not beside) then
    local number = followed and (marked and 4 or 3) or 2
    return redis.error_reply("NEEDSKEYS " .. number .. " of the four keys")
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
    if not values[LEASE] and field ~= "m:" then marks = marks + 1 end
  elseif values then
    redis.call("HDEL", key, field)
    if values[LEASE] then lapsed[field:sub(3)] = values[BY] or "" end
  end
end
for _, task in pairs(record) do
  if task[LEASE] and task[NAME] == "" then task[NAME] = shared_name or "" end
  if task[NAME] == false then task[NAME] = "" end
end

local function kept_until() return following.d + (following.q and PARKED_KEPT or KEPT) end
if following and kept_until() <= now then
  following = nil
  redis.call("HDEL", key, "f")
  redis.call("DEL", followers_key)
  redis.call("ZREM", due_key, key)
end

-- The record expires with its latest deadline.
local function expire()
  local latest = following and kept_until() or 0
  for _, each in pairs(record) do latest = math.max(latest, each[LEASE] or each[2]) end
  if latest == 0 then return redis.call("DEL", key) end
  return expire_at(latest)
end

-- Write one entry, or delete it (nil).
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

-- The mark of an id: in the record, or beside it once that has no room. There it is found by its
-- id, so that an act costs the same however many there are.
local function mark_of(id)
  local mark = record["m:" .. id]
  if mark or not record["m:"] then return mark end
  local value = redis.call("HGET", beside, id)
  mark = value and cjson.decode(value)
  return mark and mark[2] > now and mark or nil
end

-- Of a task of which there may be two messages, each must find the mark: forget leaves it. (No caller
-- publishes a copy of a task in a canvas; and an older release would not let one with such a mark
-- follow its replacement.)
local LASTING = "+"
local function is_lasting(mark) return mark[1]:sub(-1) == LASTING end
local function kind_of(mark) return is_lasting(mark) and mark[1]:sub(1, -2) or mark[1] end
local function kind_for(task, kind)
  local flags = task and task[FLAGS] or ""
  return flags:find("m") and not flags:find("c") and kind .. LASTING or kind
end

local function put_mark(id, mark)
  local field, more = "m:" .. id, record["m:"]
  local has_room = not beside or (not more and marks < MARKS_INLINE)
  if has_room or record[field] then
    if not record[field] then marks = marks + 1 end
    return write(field, mark)
  end
  redis.call("HSET", beside, id, cjson.encode(mark))
  local some = redis.call("HRANDFIELD", beside, CHECKED, "WITHVALUES")
  for i = 1, #some, 2 do
    if cjson.decode(some[i + 1])[2] <= now then redis.call("HDEL", beside, some[i]) end
  end
  local latest = math.max(mark[2], more and more[2] or 0)
  redis.call("PEXPIREAT", beside, latest - math.min(offset, 0))
  return write("m:", {"more", latest, redis.call("HLEN", beside)})
end

local function drop_mark(id)
  local more = record["m:"]
  if record["m:" .. id] then
    marks = marks - 1
    return write("m:" .. id, nil)
  end
  if not more or redis.call("HDEL", beside, id) == 0 then return nil end
  local left = redis.call("HLEN", beside)
  return write("m:", left > 0 and {"more", more[2], left} or nil)
end

-- Where a replacement has lapsed, what it replaced now waits for the replacement's own, if any.
for field, task in pairs(next(lapsed) and record or {}) do
  if lapsed[task[BY]] then
    repeat task[BY] = lapsed[task[BY]] until not lapsed[task[BY]]
    write(field, task)
  end
end

-- Whether a replacement of the task exists that is not published yet.
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
local function replaced_by(id)
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

-- The task is published or runs: remove the tasks that it replaces. Their messages are still in the
-- broker, so each leaves a mark for the gate.
local function finalise(id, mark_until)
  local replaced = replaced_by(id)
  for n = 2, #replaced do
    local task, own = record["t:" .. replaced[n]], record["t:" .. id]
    if task[STATE] ~= "r" then
      -- In a canvas it will follow, so the result must be stored before this record is deleted.
      if task[FLAGS]:find("[cf]") and not own[FLAGS]:find("f") then
        own[FLAGS] = own[FLAGS] .. "f"
        write("t:" .. id, own)
      end
      put_mark(replaced[n], {kind_for(task, "superseded"), math.max(task[LEASE], mark_until), id})
      write("t:" .. replaced[n], nil)
      for _, group in pairs(following and following.g or {}) do
        if group[1] == replaced[n] then group[1] = id end
      end
    end
  end
end

-- The replacement will not run: restore what it replaced, or leave it to the replacement's own.
local function restore_replaced(id, lease_until)
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

