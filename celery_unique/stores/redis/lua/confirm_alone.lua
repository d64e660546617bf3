-- confirm_alone: the short way of confirm: the task is the only one, so that it stands in for nobody.
--
-- KEYS, ARGV and what is returned are those of confirm
if #stored == 0 then return 0 end
if alone and alone_field == "t:" .. ARGV[2] then
  if alone[STATE] ~= "p" then return 0 end
  local lease = math.max(now, alone[ETA] or 0) + tonumber(ARGV[3])
  alone[STATE], alone[LEASE] = "w", lease - alone[CREATED]
  redis.call("HSET", key, alone_field, cjson.encode(alone))
  expire_at(lease)
  return 1
end

