-- packing: how an entry of the record is written.
--
-- Expects  stored
-- Defines  packed, is_abandoned, expire_at
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

