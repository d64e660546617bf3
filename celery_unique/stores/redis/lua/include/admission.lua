-- admission: whether a call is admitted. Returns the task that blocks it; else leaves to the script
-- what is created.
--
-- Expects  record, follower_groups, the arguments of the call by name, and readmit(own, created):
--          what is returned if the same attempt is repeated and its task exists
-- Defines  own, mark, after (field of the task that it comes after, or nil), waiting (fields of those
--          that it replaces), created (the reply), and values of the new task: ends, eta, since, flags
local own, mark = record["t:" .. id], mark_of(id)

local function shown(task) return task[STATE] == "w" and task[ETA] > now and "s" or task[STATE] end
local function blocked_by(holder, outcome)
  local task = record["t:" .. holder]
  return {holder, shown(task), task[CREATED], task[LEASE], task[ARGUMENTS], now, outcome, task[ETA],
    is_abandoned(task) and 1 or 0}
end
local joined_to = message ~= "" and holder_of(id)
if joined_to and orphaned_at(joined_to) > now then return blocked_by(joined_to, "joined") end

local function created()
  local task = record["t:" .. id]
  local reply = {now, task and task[ETA] or 0, task and task[AFTER] or ""}
  local replaced = replaced_by(id)
  for n = 2, #replaced do
    local awaited = record["t:" .. replaced[n]][FLAGS]:find("c")
    reply[#reply + 1] = (awaited and "c" or "-") .. replaced[n]
  end
  if #reply == 3 and reply[2] == 0 and reply[3] == "" then return now end
  return reply
end
if again and own then return readmit(own, created) end
-- It has finished: its mark must stay, or the message of this attempt would run it once more.
if again and mark and mark[1] ~= "withdrawn" then return now end

local function blocks(task)
  -- Two messages of one id share one record: its own id always blocks while it lives.
  if task == own and not task[STATE]:find("[cdx]") then return true end
  if task[FLAGS]:find("o") or (window > 0 and task[CREATED] + window <= now) then return false end
  -- A pending task also counts as what it is about to become.
  local waiting = task[ETA] > now and "s" or "w"
  return states:find("[" .. (task[STATE] == "p" and "p" .. waiting or shown(task)) .. "]") ~= nil
end
-- The tasks that block the call: the newest, the newest active one, and those that wait, oldest
-- first. Behind an idempotency key also what nothing may replace or follow: other work, and work
-- that is done.
local newest, active, caller, waiting, final = nil, nil, nil, {}, nil
for i = 1, #stored, 2 do
  local field, task = stored[i], record[stored[i]]
  if task and task[LEASE] and blocks(task) and not in_limbo(task) then
    local function newer(other) return not other or task[CREATED] >= record[other][CREATED] end
    if newer(newest) then newest = field end
    local done = arguments ~= "" and task[STATE]:find("[cdx]")
    if (done or task[ARGUMENTS] ~= arguments) and newer(final) then final = field end
    if task[STATE] == "r" and newer(active) then active = field end
    if task[STATE] == "r" and field == "t:" .. parent then caller = field end
    if task[STATE]:find("[pwt]") then
      local at = #waiting + 1
      while at > 1 and record[waiting[at - 1]][CREATED] > task[CREATED] do at = at - 1 end
      table.insert(waiting, at, field)
    end
  end
end

local replaces = strategy == "replace" or strategy == "replace_except_schedule"
local itself = own and not own[STATE]:find("[cdx]")
local function first(task) return task[SINCE] > 0 and task[SINCE] or task[CREATED] end
local after = not itself and not final and (caller or (strategy == "rerun" and active)) or nil
-- Postponed for max_wait: otherwise calls could replace it forever in a slow queue.
if replaces and max_wait > 0 and not (itself or final or active) then
  for at, field in ipairs(waiting) do
    local task = record[field]
    local due = task[STATE] ~= "t" and task[ETA] <= now
    if due and first(task) + max_wait <= now then
      after = table.remove(waiting, at)
      break
    end
  end
end
if itself or final or (newest and not after and not (replaces and not active)) then
  local found = itself and "t:" .. id or final or active or newest
  local holder = record[found]
  holder[DUPLICATES], holder[LAST] = holder[DUPLICATES] + 1, now
  redis.call("HSET", key, found, packed(holder, shared_name))  -- its expiry does not change
  local tolerant = strategy == "ignore" or strategy == "rerun"
  -- Other work behind the same idempotency key has no result for this call.
  local follows = message ~= "" and tolerant and not itself and found ~= "t:" .. id
    and holder[ARGUMENTS] == arguments
  if not follows then return blocked_by(found:sub(3), "") end
  if holder[STATE]:find("[cdx]") and not holder[FLAGS]:find("e") then
    return blocked_by(found:sub(3), "ended")
  end
  attach(id, found:sub(3), {"", now, name, keep, kept, arguments}, message)
  return blocked_by(found:sub(3), "joined")
end

local ends, eta, since = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0, 0
if #waiting > 0 then
  local schedule = 0
  for _, field in ipairs(waiting) do
    local task = record[field]
    if since == 0 or first(task) < since then since = first(task) end
    if task[ETA] > now then schedule = task[ETA] end
  end
  if strategy == "replace_except_schedule" and schedule > 0 then eta = schedule end
  if max_wait > 0 and eta > since + max_wait then
    eta = since + max_wait > now and since + max_wait or 0
  end
end
-- An older message of this id may still arrive: drop the mark, record that there may be two.
local flags = in_canvas .. ((own or mark) and "m" or "")
