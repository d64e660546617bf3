-- plain_duplicate: fast path of a call that a single task blocks, and that neither follows nor
-- replaces it.
--
-- Expects  entries, single_task, and the arguments of the call by name
-- Defines  nothing: returns the task that blocks the call, or leaves the rest to the full path
if single and message == "" and (strategy == "ignore" or strategy == "reject") then
  local state, waiting = single[STATE], (single[ETA] or 0) > now and "s" or "w"
  local shown = state == "w" and waiting or state
  local counts = states:find(shown, 1, true) or (state == "p" and states:find(waiting, 1, true))
  local in_window = window == 0 or single[CREATED] + window > now
  local holder = single_field:sub(3)
  local by_itself = holder == id or (state == "r" and holder == parent)
  if counts and in_window and not by_itself then
    fill_up_to(LAST)
    single[DUPLICATES], single[LAST] = single[DUPLICATES] + 1, now
    redis.call("HSET", key, single_field, cjson.encode(single))  -- its expiry does not change
    local created, lease = single[CREATED], single[CREATED] + single[LEASE]
    return {holder, shown, created, lease, single[ARGUMENTS] or "", now, "", single[ETA],
      is_abandoned(single) and 1 or 0}
  end
end

