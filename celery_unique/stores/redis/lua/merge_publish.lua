-- merge_publish: add the values of a call to a task that has not started, or admit it and push its
-- message, as publish does.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the queue, 6 the receipt of the attempt, 7 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the call's states, 5 lease, from
--          the ETA where there is one, 6 window or 0, 7 time to the ETA or 0, 8 letters of the final
--          states to keep, 9 arguments, 10 how long from its creation an ended task is kept or 0 for
--          the window, 11 strategy, see admission, 12 id of the calling task or "", 13 how long replacing may
--          postpone or 0, 14 its message if it would follow the task that blocks it, or "",
--          15 "c" when a canvas waits for the id, or "", 16 name of the attempt's mark, 17 how long
--          the receipt stays, 18 the message up to the time of its creation, 19 from there to its
--          outcome, 20 the rest, 21 how its line in a payload begins, 22 its values, 23 how long the
--          values of a task may be, 24 "1" when the same attempt is repeated (times in ms)
-- Returns  as publish; "merged" in place of "joined" when the task takes the values of the call, or as
--          text, see merged_duplicate
local offset, id, name, states = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local lease, window, delay = ARGV[5] + 0, ARGV[6] + 0, ARGV[7] + 0
local keep, arguments, kept = ARGV[8], ARGV[9], ARGV[10] + 0
local strategy, parent, max_wait, message = ARGV[11], ARGV[12], ARGV[13] + 0, ARGV[14]
local in_canvas, attempt, receipt_for = ARGV[15], ARGV[16], ARGV[17]
local head, middle, tail = ARGV[18], ARGV[19], ARGV[20]
local line_head, values, max_bytes, again = ARGV[21], ARGV[22], ARGV[23] + 0, ARGV[24] == "1"
local queue, receipt, payloads_key = KEYS[5], KEYS[6], KEYS[7]
if kept == 0 then kept = window end
if again then
  local reply = redis.call("GET", receipt)
  if reply then return cjson.decode(reply) end
end
-- @include stored
-- @include merged_duplicate
-- @include packing
-- @include push
-- @include record
joins = message ~= ""
-- @include follower_groups
-- @include payload
-- @include published
-- @include merge_admission
record["t:" .. id] = {1, "w", now, 0, name, ends, eta, keep, 0, 0, "", 0, "", flags, "",
  after and after:sub(3) or "", arguments, 0, 0}
local reply = published(record["t:" .. id], created())
if type(reply) ~= "table" or not reply.err then begin_payload() end
return reply
