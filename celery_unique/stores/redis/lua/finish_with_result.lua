-- finish_with_result: the body has finished; write and announce its result in the same act.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the result, and the channel of its announcement, 6 the payloads of its tasks, where it
--          may have one
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 letter of the final state, 5 retention,
--          6 "1" when settle follows in any case, 7 how long marks stay, 8 how long the
--          delivery is believed alive while it completes followers, 9 token of the start that
--          ends, or "" (times in ms), 10 "1" when the message was rejected: it may be redelivered,
--          and is then to run, 11 the result up to the number of duplicates, 12 the rest, 13 when
--          it expires, in seconds, or 0, 14 "1" when a result that is stored must not be replaced,
--          15 "1" when the same end is reported again
-- Returns  as finish; {"stored"}: there is a result, and nothing has changed
local offset, id, delivery, state = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local retention, settle_later, mark_for = ARGV[5] + 0, ARGV[6] == "1", ARGV[7] + 0
local run_lease, token, rejected = ARGV[8] + 0, ARGV[9], ARGV[10] == "1"
local head, tail, expires_s, unless_stored = ARGV[11], ARGV[12], ARGV[13], ARGV[14] == "1"
local again = ARGV[15] == "1"
local result_key, payloads_key = KEYS[5], KEYS[6]
-- @include stored
-- @include sole_run
local reply, result
-- What the same end has written, whose reply was lost: it has the number of duplicates.
local before, counted = again and redis.pcall("GET", result_key), nil
if type(before) == "string" and before:sub(1, #head) == head then
  counted = before:sub(#head + 1, -#tail - 1)
end
if answered then
  result, reply = head .. answered .. tail, answered + 0
  if unless_stored and expires_s ~= "0" then
    if not redis.call("SET", result_key, result, "EX", expires_s, "NX") then return {"stored"} end
    redis.call("DEL", key)
    redis.call("PUBLISH", result_key, result)
    return reply
  end
end
if unless_stored and not counted and redis.call("EXISTS", result_key) == 1 then return {"stored"} end
if answered then
  redis.call("DEL", key)
else
  -- @include packing
  local function finish()
    -- @include finished
  end
  reply = finish()
  if reply.err then return reply end
  if counted and reply[3] then reply[3] = math.max(reply[3], tonumber(counted) or 0) end
  result = head .. (reply[3] or 0) .. tail
end
if expires_s ~= "0" then
  redis.call("SETEX", result_key, expires_s, result)
else
  redis.call("SET", result_key, result)
end
redis.call("PUBLISH", result_key, result)
return reply
