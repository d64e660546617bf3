-- settle: result and acknowledgement are done, so the ending task may be removed.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks, where it may have one
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 letter of the final state, 5 retention,
--          6 how long a done mark stays, 7 "1" when the message may exist twice (times in ms),
--          8 "1" when the message was rejected: it may be redelivered, and is then to run
-- Returns  1 settled, 0 no effect: not ending, or held by another delivery (fire-and-forget: the
--          reply is not used)
local offset, id, delivery, state = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local retention, mark_for = ARGV[5] + 0, ARGV[6] + 0
local mark_done, rejected = ARGV[7] == "1", ARGV[8] == "1"
-- @include entries
-- @include record
-- @include follower_groups
local payloads_key = KEYS[5]

local field, task = "t:" .. id, record["t:" .. id]
if not task or not task[FLAGS]:find("e") or task[DELIVERY] ~= delivery then return 0 end
if (mark_done or task[FLAGS]:find("m")) and not rejected then
  put_mark(id, {"done", now + mark_for})
end
local keep_until = task[WINDOW_ENDS] > 0 and task[WINDOW_ENDS] or now + retention
-- @include conclude
return 1
