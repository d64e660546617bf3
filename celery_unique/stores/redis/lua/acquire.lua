-- acquire: admit a call as a pending task, or return the task that blocks it.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the call's states, 5 grace,
--          6 window or 0, 7 time to the ETA or 0, 8 letters of the final states to keep,
--          9 arguments, 10 how long from its creation an ended task is kept or 0 for the
--          window, 11 strategy, see admission, 12 id of the calling task or "", 13 how long replacing may
--          postpone or 0, 14 its message if it would follow the task that blocks it, or "",
--          15 "c" when a canvas waits for the id, or "", 16 "1" when the same attempt is repeated,
--          "?" to probe: nothing is created (times in ms)
-- Returns  now: created, with nothing to add
--          {now, ETA or 0, id it comes after or "", ids it replaces ...}: created; each of these
--          is prefixed with "c" when a canvas waits for it, else with "-"
--          {id, letter of its state, created_at, lease, arguments, now, "joined" when the call
--          follows that task, "ended" when that has ended, else "", ETA or 0, 1 when it waits and
--          the process that held its message is believed dead, else 0}: blocked by that task;
--          or as text, see waiting_duplicate
--          the same with "queued" or "full" and a tenth value, the number of parked calls: the call
--          is parked, or the lane is full. The id is "" where no task blocks the call
--          nil: probed, and it would be created
-- A number is ARGV[n] + 0: a third of the time of tonumber.
local offset, id, name, states = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local grace, window, delay = ARGV[5] + 0, ARGV[6] + 0, ARGV[7] + 0
local keep, arguments, kept = ARGV[8], ARGV[9], ARGV[10] + 0
local strategy, parent, max_wait, message = ARGV[11], ARGV[12], ARGV[13] + 0, ARGV[14]
local in_canvas, kind = ARGV[15], ARGV[16]
local again, probes = kind == "1", kind == "?"
if kept == 0 then kept = window end
-- @include stored

-- Fast paths, before the first function: nothing is stored under the key, as for nearly every new
-- call; or one task is, and blocks the call.
if #stored == 0 and probes then return false end
if #stored == 0 and kept == 0 and delay == 0 and keep == "" and arguments == "" and in_canvas == ""
then
  redis.call("HSET", key, "n", name, "t:" .. id, '[1,"p",' .. now .. "," .. grace .. "]")
  redis.call("PEXPIREAT", key, now + grace - math.min(offset, 0))
  return now
end
-- @include waiting_duplicate
-- @include single_task
-- @include plain_duplicate
-- @include packing

if #stored == 0 then
  local ends, eta = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0
  redis.call("HSET", key, "n", name, "t:" .. id, packed({1, "p", now, now + grace, name, ends, eta,
    keep, 0, 0, "", 0, "", in_canvas, "", "", arguments, 0}, name))
  expire_at(now + grace)
  if eta == 0 then return now end
  return {now, eta, ""}
end

-- Full path.
-- @include record
joins = message ~= ""
-- @include follower_groups
local put_receipt = nothing
local function readmit(own, created)
  if own[STATE] == "p" and not probes then
    own[LEASE] = math.max(own[LEASE], now + grace)
    write("t:" .. id, own)
  end
  return created()
end
-- @include admission
if probes then return false end
write("t:" .. id, {1, "p", now, now + grace, name, ends, eta, keep, 0, 0, "", 0, "", flags, "",
  after and after:sub(3) or "", arguments, since})
if mark then drop_mark(id) end
stop_following(id)
set_due_time()
for _, field in ipairs(waiting) do
  record[field][BY] = id  -- in limbo until the new one is published
  write(field, record[field])
end
return created()
