-- renew: extend the leases of one message that a worker still holds. Never creates.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 delivery, or "" when the message is only held,
--          4 lease, 5 delivery lease (times in ms), 6 "1": the message may come back while it runs,
--          7 the delivery as which a message that is only held starts, 8 for how long the worker
--          is believed alive with such a message or 0, 9 "1": it is in the broker again
-- Returns  0 lost: absent, or another delivery's; else extended: one more than follow it
local id, delivery = ARGV[2], ARGV[3]
local lease, run_lease = tonumber(ARGV[4]), tonumber(ARGV[5])

local task, mark = record["t:" .. id], mark_of(id)
local function followers()
  local count = 0
  for _, group in pairs(following and following.g or {}) do
    if group[1] == id then count = count + group[2] end
  end
  return count
end
local over = task and task[STATE]:find("[cdx]")
if delivery ~= "" then
  if not task or task[DELIVERY] ~= delivery then return 0 end
  if over and not task[FLAGS]:find("e") then return 0 end
  task[LEASE] = math.max(task[LEASE], now + lease)
  task[DELIVERY_LEASE] = math.max(task[DELIVERY_LEASE], now + run_lease)
  if ARGV[6] == "1" and not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
  write("t:" .. id, task)
  return 1 + followers()
end
if mark then  -- beside a kept task too: this message must still meet it
  mark[2] = math.max(mark[2], now + lease)
  put_mark(id, mark)
end
local has_started = task and task[DELIVERY] ~= "" and task[DELIVERY] == ARGV[7]
if task and not over and not has_started then
  local pending = task[STATE] == "p"
  if pending then task[STATE] = "w" end  -- a message in hand has been published
  task[LEASE] = math.max(task[LEASE], math.max(now, task[ETA]) + lease)
  local held = tonumber(ARGV[8])
  if ARGV[9] == "1" then task[HELD] = 0 end
  if held > 0 and task[STATE] ~= "r" then task[HELD] = math.max(task[HELD], now + held) end
  write("t:" .. id, task)
  if pending then
    finalise(id, now + lease)
    stop_following(id)
    look_after()
  end
end
return (task or mark) and 1 + followers() or 0
