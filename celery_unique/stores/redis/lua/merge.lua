-- merge: add the values of a call to a task that has not started, or admit it as acquire does.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the call's states, 5 grace,
--          6 window or 0, 7 time to the ETA or 0, 8 letters of the final states to keep,
--          9 arguments, 10 how long from its creation an ended task is kept or 0 for the
--          window, 11 strategy, see admission, 12 id of the calling task or "", 13 how long replacing may
--          postpone or 0, 14 its message if it would follow the task that blocks it, or "",
--          15 "c" when a canvas waits for the id, or "", 16 how its line in a payload begins,
--          17 its values, 18 how long the values of a task may be, 19 "1" when the same attempt is
--          repeated, "?" to probe: nothing is created; "?1" when a probe is repeated (times in ms)
-- Returns  as acquire; "merged" in place of "joined" when the task takes the values of the call, or as
--          text, see merged_duplicate
local offset, id, name, states = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local grace, window, delay = ARGV[5] + 0, ARGV[6] + 0, ARGV[7] + 0
local keep, arguments, kept = ARGV[8], ARGV[9], ARGV[10] + 0
local strategy, parent, max_wait, message = ARGV[11], ARGV[12], ARGV[13] + 0, ARGV[14]
local in_canvas, line_head, values, max_bytes = ARGV[15], ARGV[16], ARGV[17], ARGV[18] + 0
local kind, payloads_key = ARGV[19], KEYS[5]
local again, probes = kind:sub(-1) == "1", kind:sub(1, 1) == "?"
if kept == 0 then kept = window end
-- @include stored
-- @include merged_duplicate
-- @include packing
-- @include record
joins = message ~= ""
-- @include follower_groups
-- @include payload
local function readmit(own, created)
  if probes then return false end  -- the task of another call with its id: the publish decides
  if own[STATE] == "p" then
    own[LEASE] = math.max(own[LEASE], now + grace)
    write("t:" .. id, own)
  end
  return created()
end
-- @include merge_admission
if probes then return false end
write("t:" .. id, {1, "p", now, now + grace, name, ends, eta, keep, 0, 0, "", 0, "", flags, "",
  after and after:sub(3) or "", arguments, 0, 0})
begin_payload()
if mark then drop_mark(id) end
stop_following(id)
set_due_time()
return created()
