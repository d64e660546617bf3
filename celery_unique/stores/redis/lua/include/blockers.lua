-- blockers: what is in the way of a call. Returns the reply for a call that follows a task already,
-- and for an attempt that is repeated.
--
-- The strategy is its name; or that, the limit, the greatest number of parked calls or 0, and the grace
-- of a parked call, separated by colons: other calls do not pay for these.
-- Expects  record, follower_groups, the arguments of the call by name, and readmit(own, created):
--          what is returned if the same attempt is repeated and its task exists
-- Defines  own, mark, blocked_by, created (the reply), limit, queues, max_queue, parked_grace,
--          parked_before; of the tasks that block the call: newest, active, caller, waiting, final,
--          number, running
local own, mark = record["t:" .. id], mark_of(id)

local function shown(task) return task[STATE] == "w" and task[ETA] > now and "s" or task[STATE] end
local function blocked_by(holder, outcome)
  local task = record["t:" .. holder]
  return {holder, shown(task), task[CREATED], task[LEASE], task[ARGUMENTS], now, outcome, task[ETA],
    is_abandoned(task) and 1 or 0}
end
local limit, max_queue, parked_grace = 1, 0, 0
if strategy:find(":", 1, true) then
  strategy, limit, max_queue, parked_grace = strategy:match("^(.-):(%d+):(%d+):(%d+)$")
  limit, max_queue, parked_grace = limit + 0, max_queue + 0, parked_grace + 0
end
local queues = strategy == "queue"
local joined_to = message ~= "" and not queues and not is_parked(id) and holder_of(id)
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
local parked_before = queues and is_parked(id)
if parked_before then again = false end
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
local number, running = 0, 0
for i = 1, #stored, 2 do
  local field, task = stored[i], record[stored[i]]
  if task and task[LEASE] and blocks(task) and not in_limbo(task) then
    local function newer(other) return not other or task[CREATED] >= record[other][CREATED] end
    if newer(newest) then newest = field end
    number, running = number + 1, running + (task[STATE] == "r" and 1 or 0)
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
