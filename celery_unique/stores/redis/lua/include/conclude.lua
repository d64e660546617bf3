-- conclude: remove the task that has finished, or keep it in its final state.
--
-- Expects  record, follower_groups, field, task, state, keep_until, rejected
-- Defines  nothing
if not task[KEEP]:find(state) or keep_until <= now then
  write(field, nil)
else
  task[STATE], task[LEASE], task[DELIVERY_LEASE] = state, keep_until, 0
  task[FLAGS] = task[FLAGS]:gsub("e", "") .. (rejected and "j" or "")
  write(field, task)
end
set_due_time()

