-- plain_duplicate: fast path of a call that a single task blocks, and that neither follows nor
-- replaces it.
--
-- Expects  single_task, and the arguments of the call by name
-- Defines  nothing: returns the task that blocks the call, or leaves the rest to the full path
if single and message == "" and (strategy == "ignore" or strategy == "reject") then
  local state, eta, created = single[STATE], single[ETA] or 0, single[CREATED]
  local waiting = eta > now and "s" or "w"
  local shown = state == "w" and waiting or state
  local counts = states:find(shown, 1, true) or (state == "p" and states:find(waiting, 1, true))
  local in_window = window == 0 or created + window > now
  local holder = single_field:sub(3)
  local by_itself = holder == id or (state == "r" and holder == parent)
  if counts and in_window and not by_itself then
    -- Values that were left out, up to the last one that is set here.
    for n = #single + 1, LAST do single[n] = (n == NAME or n == KEEP) and "" or 0 end
    single[DUPLICATES], single[LAST] = single[DUPLICATES] + 1, now
    redis.call("HSET", key, single_field, cjson.encode(single))  -- its expiry does not change
    local held = single[HELD] or 0
    local abandoned = held > 0 and held <= now and (state == "w" or state == "t")
    return {holder, shown, created, created + single[LEASE], single[ARGUMENTS] or "", now, "", eta,
      abandoned and 1 or 0}
  end
end

