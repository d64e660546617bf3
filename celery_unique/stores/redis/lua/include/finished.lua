-- finished: the end of a body. Only the delivery that started may report it, or any when none is
-- recorded (revoked or expired before the start, or the store was unavailable at the gate).
--
-- Expects  sole_run, packing, and the arguments of finish by name
-- Defines  nothing: returns the reply of finish
-- Fast path: the task is the only one, without followers, nothing of it is kept, and its message is
-- acknowledged and was the only one.
-- @include single_task
if single and single_field == field and single[STATE] == "r" and single[DELIVERY] == delivery
  and not settle_later and not (single[KEEP] or ""):find(state, 1, true) then
  redis.call("DEL", key)
  return {"ended", 0, single[DUPLICATES] or 0, 0}
end

-- Full path.
-- @include record
-- @include follower_groups
local mark_until = now + mark_for
local task = record[field]
if not task then
  if again then return {"ended", 0, 0, 0, unconfirmed()} end
  return {"not_yours"}
end
local ending, duplicates = task[FLAGS]:find("e"), task[DUPLICATES]
local mine = task[DELIVERY] == delivery and (task[STATE] == "r" or ending)
-- No delivery holds it; one that stalled and was taken over has lost it anyway.
if task[DELIVERY] == "" then
  mine = not task[STATE]:find("[cdx]") and (token == "" or token == task[TOKEN])
end
if not mine then
  local kept_end = task[STATE]:find("[cdx]") and (task[DELIVERY] == "" or task[DELIVERY] == delivery)
  if again and kept_end then return {"ended", 0, 0, 0, unconfirmed()} end
  return {"not_yours"}
end
-- A hard time limit reports twice.
local function is_awaited() return is_followed(id) or task[FLAGS]:find("f") end
if ending then
  return {"ended", 1, duplicates, is_awaited() and 1 or 0, again and unconfirmed() or nil}
end
-- Its publish was never confirmed: it has replaced others if it ran, else they are restored.
if task[STATE] == "p" then
  if state == "x" then restore_replaced(id, mark_until) else finalise(id, mark_until) end
end
local followed = is_awaited()
stop_following(id)
local keep_until = task[WINDOW_ENDS] > 0 and task[WINDOW_ENDS] or now + retention
if settle_later or task[FLAGS]:find("m") or followed then
  -- Callers see the final state from here on, but a redelivery before the result is stored
  -- must still find the record.
  task[STATE], task[DELIVERY], task[FLAGS] = state, delivery, task[FLAGS] .. "e"
  -- Kept even if no worker lives to settle it.
  if task[KEEP]:find(state) then task[LEASE] = math.max(task[LEASE], keep_until) end
  -- No other worker completes its followers while this delivery is believed alive.
  if followed then
    task[DELIVERY_LEASE] = math.max(task[DELIVERY_LEASE], now + run_lease)
  end
  write(field, task)
  local called = call_parked()
  set_due_time()
  return {"ended", 1, duplicates, followed and 1 or 0, called}
end
-- @include conclude
local called = call_parked()
if called and #called > 0 then set_due_time() end
return {"ended", 0, duplicates, 0, called}
