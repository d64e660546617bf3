-- acquire_alone: the short way of acquire to a plain duplicate: one task is there, it blocks the
-- call, and the call neither follows it nor takes its place.
--
-- KEYS, ARGV and what is returned are those of acquire
if alone and ARGV[14] == "" and (ARGV[11] == "ignore" or ARGV[11] == "reject") then
  local state, asked, window = alone[STATE], ARGV[4], tonumber(ARGV[6])
  local waiting = (alone[ETA] or 0) > now and "s" or "w"
  local shown = state == "w" and waiting or state
  local counts = asked:find(shown, 1, true) or (state == "p" and asked:find(waiting, 1, true))
  local in_window = window == 0 or alone[CREATED] + window > now
  local holder = alone_field:sub(3)
  local by_itself = holder == ARGV[2] or (state == "r" and holder == ARGV[12])
  if counts and in_window and not by_itself then
    fill_up_to(LAST)
    alone[DUPLICATES], alone[LAST] = alone[DUPLICATES] + 1, now
    redis.call("HSET", key, alone_field, cjson.encode(alone))  -- it lasts no longer for this
    local created, lease = alone[CREATED], alone[CREATED] + alone[LEASE]
    return {holder, shown, created, lease, alone[ARGUMENTS] or "", now, "", alone[ETA],
      is_abandoned(alone) and 1 or 0}
  end
end

