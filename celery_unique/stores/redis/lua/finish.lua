-- finish: the body is over. Only the delivery that started may say so, or anyone when none is
-- recorded (revoked or expired before the start, or the store was down at the gate).
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 letter of the final state, 5 retention,
--          6 "1" when settle follows in any case, 7 how long marks stay, 8 how long the
--          delivery is believed alive while it completes followers, 9 token of the start that
--          ends, or "" (times in ms), 10 "1" when the message was rejected: it may come back,
--          and is then to run
-- Returns  {"ended", 1 when settle must follow else 0, duplicates, 1 when followed else 0},
--          {"not_yours"}
local field, delivery = "t:" .. ARGV[2], ARGV[3]
local state, retention, settle_later = ARGV[4], tonumber(ARGV[5]), ARGV[6] == "1"
local mark_until, token = now + tonumber(ARGV[7]), ARGV[9]

local task = record[field]
if not task then return {"not_yours"} end
local ending, duplicates = task[FLAGS]:find("e"), task[DUPLICATES]
local mine = task[DELIVERY] == delivery and (task[STATE] == "r" or ending)
-- Nobody has it: but a delivery that stood still, and was taken over, has lost it all the same.
if task[DELIVERY] == "" then
  mine = not task[STATE]:find("[cdx]") and (token == "" or token == task[TOKEN])
end
if not mine then return {"not_yours"} end
-- A hard time limit reports twice.
local function is_awaited() return is_followed(ARGV[2]) or task[FLAGS]:find("f") end
if ending then return {"ended", 1, duplicates, is_awaited() and 1 or 0} end
-- The store never heard that it was published: what it stands in for is over if it ran, else back.
if task[STATE] == "p" then
  if state == "x" then bring_back(ARGV[2], mark_until) else finalise(ARGV[2], mark_until) end
end
local followed = is_awaited()
stop_following(ARGV[2])
local keep_until = task[WINDOW_ENDS] > 0 and task[WINDOW_ENDS] or now + retention
if settle_later or task[FLAGS]:find("m") or followed then
  -- Callers see the final state from here on, but a redelivery before the result is stored
  -- must still find the record.
  task[STATE], task[DELIVERY], task[FLAGS] = state, delivery, task[FLAGS] .. "e"
  -- Kept also if nobody lives to settle it.
  if task[KEEP]:find(state) then task[LEASE] = math.max(task[LEASE], keep_until) end
  -- Nobody else completes its followers while this delivery is believed alive.
  if followed then
    task[DELIVERY_LEASE] = math.max(task[DELIVERY_LEASE], now + tonumber(ARGV[8]))
  end
  write(field, task)
  look_after()
  return {"ended", 1, duplicates, followed and 1 or 0}
end
if not task[KEEP]:find(state) or keep_until <= now then
  write(field, nil)
else
  task[STATE], task[LEASE], task[DELIVERY_LEASE] = state, keep_until, 0
  task[FLAGS] = task[FLAGS]:gsub("e", "") .. (ARGV[10] == "1" and "j" or "")
  write(field, task)
end
look_after()
return {"ended", 0, duplicates, 0}
