-- publish_plain: publish for a call that has nothing but its name, states and lease, as nearly every
-- call. It decides where nothing is stored under the key, or one task that blocks the call, and
-- leaves any other record to publish. Most of a script's time is its arguments and commands: it has
-- half as many.
--
-- KEYS     1 the record of the key, 2 the queue, 3 the receipt of the attempt
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the call's states, 5 lease, 6 how long
--          the receipt stays, 7 the message up to the time of its creation, 8 the rest, 9 id of the
--          calling task or "", 10 "1" when the same attempt is repeated (times in ms)
-- Returns  as publish; {0}: use publish; {1}: use publish, as a repeated attempt
local offset, id, name, states, lease = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local receipt_for, head, rest, parent, again = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10] == "1"
local queue, receipt = KEYS[2], KEYS[3]
if again then
  local reply = redis.call("GET", receipt)
  if reply then return cjson.decode(reply) end
end
-- @include stored

-- The message is pushed before the first write, so a refusal leaves nothing to undo.
if #stored == 0 then
  local at = now .. ""
  local pushed = redis.pcall("LPUSH", queue, head .. at .. rest)
  if type(pushed) == "table" then return redis.error_reply("QUEUE " .. pushed.err) end
  redis.call("HSET", key, "n", name, "t:" .. id, '[1,"w",' .. at .. "," .. lease .. "]")
  -- The deadline is now + lease - min(offset, 0); the text of the lease is shorter to hand on.
  redis.call("PEXPIRE", key, offset > 0 and lease + offset or lease)
  redis.call("PSETEX", receipt, receipt_for, at)
  return now
end

local strategy, message, window = "ignore", "", 0
-- @include waiting_duplicate
-- @include single_task
-- @include plain_duplicate
return {again and 1 or 0}
