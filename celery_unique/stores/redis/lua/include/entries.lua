-- entries: the time, what is stored under the key, and how an entry is written. Included first by
-- every script.
--
-- KEYS[1]  the record of the key: a hash with a field t:<id> per task, m:<id> per mark, token,
--          n, the name of its tasks, and f, while there are followers: when they are due, which
--          worker reaps them, which task each group follows and its size, which are promoted.
--          m: alone, while there are marks beside the record: until when, and how many
-- Expects  offset, the clock offset in ms
-- Defines  key, clock, now, stored (the fields in order), packed, is_abandoned, expire_at; the
--          places of a task's values by name
local STATE, CREATED, LEASE, WINDOW_ENDS, ETA, KEEP, DUPLICATES, LAST = 2, 3, 4, 6, 7, 8, 9, 10
local DELIVERY, DELIVERY_LEASE, TOKEN, FLAGS, BY, AFTER, ARGUMENTS = 11, 12, 13, 14, 15, 16, 17
local NAME, SINCE, HELD = 5, 18, 19
local key = KEYS[1]
local clock, stored = redis.call("TIME"), redis.call("HGETALL", key)
local now = clock[1] * 1000 + math.floor(clock[2] / 1000) + offset

-- An entry as text. A mark has less than four values. A task's empty values at the end are not
-- stored, its lease counts from its creation, and an empty name means the shared one. All this
-- keeps a value below the 64 bytes up to which Redis packs a hash tightly.
local function packed(values, shared_name)
  local last, kept = #values, {}
  for n = 1, last do kept[n] = values[n] end
  if values[LEASE] then
    kept[LEASE] = values[LEASE] - values[CREATED]
    if values[NAME] == shared_name then
      kept[NAME] = ""
    elseif values[NAME] == "" then
      kept[NAME] = false  -- no name at all, beside a task that has one
    end
  end
  while kept[last] == "" or (kept[last] == 0 and last > LEASE) do
    kept[last], last = nil, last - 1
  end
  return cjson.encode(kept)
end

-- Whether the task waits and the process that held its message is believed dead.
local function is_abandoned(task)
  return (task[HELD] or 0) > 0 and task[HELD] <= now and task[STATE]:find("[wt]") ~= nil
end

local function expire_at(deadline)
  return redis.call("PEXPIREAT", key, deadline - math.min(offset, 0))
end

