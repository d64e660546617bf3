-- renew: extend the leases of one message that a worker still holds. Never creates.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks, where it may have one
-- ARGV     1 clock offset, 2 task id, 3 delivery, or "" when the message is only held,
--          4 lease, 5 delivery lease, 6 "1": the message may exist twice,
--          7 the delivery under which a message that is only held starts, 8 for how long the
--          worker is believed alive with such a message or 0, 9 "1": it is in the broker again
--          (times in ms)
-- Returns  0 lost: absent, or held by another delivery; else 1 plus the number of followers
local offset, id, delivery = ARGV[1] + 0, ARGV[2], ARGV[3]
local lease, run_lease, copies = ARGV[4] + 0, ARGV[5] + 0, ARGV[6] == "1"
local waits_as, held, returned = ARGV[7], ARGV[8] + 0, ARGV[9] == "1"
-- @include entries
-- @include record
-- @include follower_groups
local payloads_key = KEYS[5]

local task, mark = record["t:" .. id], mark_of(id)
local function followers()
  local count = 0
  for _, group in pairs(following and following.g or {}) do
    if group[1] == id then count = count + group[2] end
  end
  return count
end
local function keep()
  -- @include payload
  keep_payload(id, task)
end
local ended = task and task[STATE]:find("[cdx]")
if delivery ~= "" then
  if not task or task[DELIVERY] ~= delivery then return 0 end
  if ended and not task[FLAGS]:find("e") then return 0 end
  task[LEASE] = math.max(task[LEASE], now + lease)
  task[DELIVERY_LEASE] = math.max(task[DELIVERY_LEASE], now + run_lease)
  if copies and not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
  write("t:" .. id, task)
  -- Parked calls wait for a longer lease: no worker needs to look at them before that.
  if following and following.q then set_due_time() end
  if task[FLAGS]:find("p") then keep() end
  return 1 + followers()
end
if mark then  -- also beside a kept task: this message must still find it
  mark[2] = math.max(mark[2], now + lease)
  put_mark(id, mark)
end
local has_started = task and task[DELIVERY] ~= "" and task[DELIVERY] == waits_as
if task and not ended and not has_started then
  local pending = task[STATE] == "p"
  if pending then task[STATE] = "w" end  -- a received message has been published
  task[LEASE] = math.max(task[LEASE], math.max(now, task[ETA]) + lease)
  if copies and not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
  if returned then task[HELD] = 0 end
  if held > 0 and task[STATE] ~= "r" then task[HELD] = math.max(task[HELD], now + held) end
  write("t:" .. id, task)
  if task[FLAGS]:find("p") then keep() end
  if pending then
    finalise(id, now + lease)
    stop_following(id)
  end
  if pending or (following and following.q) then set_due_time() end
end
return (task or mark) and 1 + followers() or 0
