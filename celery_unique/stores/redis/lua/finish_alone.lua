-- finish_alone: the short way of finish: the task is the only one, nobody follows it, nothing of it
-- is kept, and its message is acknowledged and was the only one.
--
-- KEYS, ARGV and what is returned are those of finish
if alone and alone_field == "t:" .. ARGV[2] and alone[STATE] == "r" and alone[DELIVERY] == ARGV[3]
  and ARGV[6] ~= "1" and not (alone[KEEP] or ""):find(ARGV[4], 1, true) then
  redis.call("DEL", key)
  return {"ended", 0, alone[DUPLICATES] or 0, 0}
end

