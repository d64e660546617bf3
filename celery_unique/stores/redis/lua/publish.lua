-- publish: admit a call and push its message, or return the task that blocks it. The task is recorded
-- as available, as by acquire and confirm. A message that the server refuses to push changes nothing.
-- For nearly every call publish_plain is enough.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the queue, 6 the receipt of the attempt
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the call's states, 5 lease, from
--          the ETA where there is one, 6 window or 0, 7 time to the ETA or 0, 8 letters of the final
--          states to keep, 9 arguments, 10 how long from its creation an ended task is kept or 0 for
--          the window, 11 strategy, see admission, 12 id of the calling task or "", 13 how long replacing may
--          postpone or 0, 14 its message if it would follow the task that blocks it, or "",
--          15 "c" when a canvas waits for the id, or "", 16 name of the attempt's mark, 17 how long
--          the receipt stays, 18 the message up to the time of its creation, 19 from there to its
--          outcome, 20 the rest, 21 "1" when the same attempt is repeated (times in ms)
-- Returns  as acquire; QUEUE and the server's error: the message was refused; WITHDRAWN: the attempt was
--          withdrawn before
local offset, id, name, states, lease = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4], ARGV[5] + 0
local window, delay, keep, arguments, kept = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local strategy, parent, max_wait, message = ARGV[11], ARGV[12], ARGV[13] + 0, ARGV[14]
local in_canvas, attempt, receipt_for = ARGV[15], ARGV[16], ARGV[17]
local head, middle, tail, again = ARGV[18], ARGV[19], ARGV[20], ARGV[21] == "1"
local queue, receipt = KEYS[5], KEYS[6]
if again then
  local reply = redis.call("GET", receipt)
  if reply then return cjson.decode(reply) end
end
-- @include stored

window, delay, kept = window + 0, delay + 0, kept + 0
if kept == 0 then kept = window end
-- @include waiting_duplicate
-- @include single_task
-- @include plain_duplicate
-- @include packing
-- @include push

if #stored == 0 then
  local ends, eta = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0
  local refused, deadline = push(""), math.max(now, eta) + lease
  if refused then return refused end
  redis.call("HSET", key, "n", name, "t:" .. id, packed({1, "w", now, deadline, name, ends, eta,
    keep, 0, 0, "", 0, "", in_canvas, "", "", arguments, 0}, name))
  expire_at(deadline)
  local reply = eta == 0 and now or {now, eta, ""}
  put_receipt(reply)
  return reply
end

-- Full path.
-- @include record
joins = message ~= ""
-- @include follower_groups
-- @include published
-- @include admission
record["t:" .. id] = {1, "w", now, 0, name, ends, eta, keep, 0, 0, "", 0, "", flags, "",
  after and after:sub(3) or "", arguments, since}
for _, field in ipairs(waiting) do record[field][BY] = id end
return published(record["t:" .. id], created())
