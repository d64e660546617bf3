-- retry: the task waits for its next try, and the delivery that ran it releases it.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 lease, 5 "1" when there may be two messages
--          (times in ms)
-- Returns  1 done, 0 no effect: not active, or held by another delivery
local offset, id, delivery = ARGV[1] + 0, ARGV[2], ARGV[3]
local lease, copies = ARGV[4] + 0, ARGV[5] == "1"
-- @include entries
-- @include record
-- @include follower_groups
local payloads_key = KEYS[5]

local task = record["t:" .. id]
if not task or task[STATE] ~= "r" or task[DELIVERY] ~= delivery then return 0 end
task[STATE], task[LEASE], task[DELIVERY], task[DELIVERY_LEASE] = "t", now + lease, "", 0
task[HELD] = 0  -- the message of the retry is in the broker
if copies and not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
write("t:" .. id, task)
if task[FLAGS]:find("p") then
  -- @include payload
  keep_payload(id, task)
end
set_due_time()
return 1
