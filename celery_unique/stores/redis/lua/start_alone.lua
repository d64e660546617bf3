-- start_alone: the short way of start: the task is the only one, and no delivery has started it.
--
-- KEYS, ARGV and what is returned are those of start
if alone and alone_field == "t:" .. ARGV[2] and (alone[DELIVERY] or "") == ""
  and alone[STATE]:find("[pwt]") then
  local last_token = 0
  for i = 1, #stored, 2 do
    if stored[i] == "token" then last_token = tonumber(stored[i + 1]) end
  end
  local token = math.max(last_token + 1, clock[1] * 1000000 + clock[2] + offset * 1000)
  local text = string.format("%.0f", token)  -- cjson and tostring keep 14 digits, it has 16
  local lease = now + tonumber(ARGV[5])
  fill_up_to(TOKEN)
  alone[STATE], alone[LEASE], alone[TOKEN] = "r", lease - alone[CREATED], text
  alone[DELIVERY], alone[DELIVERY_LEASE] = ARGV[3], now + tonumber(ARGV[6])
  if alone[HELD] then
    alone[HELD] = 0
    for n = #alone, TOKEN + 1, -1 do
      if alone[n] ~= "" and alone[n] ~= 0 then break end
      alone[n] = nil
    end
  end
  redis.call("HSET", key, "token", text, alone_field, cjson.encode(alone))
  expire_at(lease)
  return {"run", token, 0}
end

