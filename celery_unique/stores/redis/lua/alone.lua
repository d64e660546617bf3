-- alone: stands behind the entries of the acts that have a short way. Nearly every record is that of
-- one live task and nothing else: no mark, no follower, nobody it stands in for or waits for.
--
-- Gives    alone, the values of that task as they are stored: without the last ones where these are
--          empty, and with a lease that counts from its creation. nil where there is more to look
--          at, which the long way does. alone_field, its field; fill_up_to
local alone, alone_field, others = nil, nil, nil
for i = 1, #stored, 2 do
  local field = stored[i]
  if field ~= "n" and field ~= "token" then
    others = alone or field:sub(1, 2) ~= "t:"
    if others then break end
    alone, alone_field = cjson.decode(stored[i + 1]), field
  end
end
if alone and (others or alone[CREATED] + alone[LEASE] <= now or (alone[FLAGS] or ""):find("[efjmo]")
  or (alone[BY] or "") ~= "" or (alone[AFTER] or "") ~= "") then alone = nil end

-- The values that were left out, up to this one, so that it can be set.
local function fill_up_to(place)
  for n = #alone + 1, place do
    local is_number = n == WINDOW_ENDS or n == ETA or n == DUPLICATES or n == LAST
      or n == DELIVERY_LEASE
    alone[n] = is_number and 0 or ""
  end
end

