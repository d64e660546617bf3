-- conclude: remove the task that has finished, or keep it in its final state.
--
-- Expects  record, follower_groups, id, field, task, state, keep_until, rejected, payloads_key
-- Defines  nothing
if task[FLAGS]:find("p") then
  -- @include payload
  drop_payload(id)
  task[FLAGS] = task[FLAGS]:gsub("p", "")
end
if not task[KEEP]:find(state) or keep_until <= now then
  write(field, nil)
else
  task[STATE], task[LEASE], task[DELIVERY_LEASE] = state, keep_until, 0
  task[FLAGS] = task[FLAGS]:gsub("e", "") .. (rejected and "j" or "")
  write(field, task)
end
set_due_time()

