-- single_task: for the fast path of a script. Nearly every record is that of one live task and
-- nothing else: no mark, no follower, no task that it replaces or waits for.
--
-- Expects  entries
-- Defines  single, the values of that task as they are stored: without the last ones where these
--          are empty, and with a lease that counts from its creation. nil where the record holds
--          more, which the full path handles. single_field, its field; fill_up_to
local single, single_field, others = nil, nil, nil
for i = 1, #stored, 2 do
  local field = stored[i]
  if field ~= "n" and field ~= "token" then
    others = single or field:sub(1, 2) ~= "t:"
    if others then break end
    single, single_field = cjson.decode(stored[i + 1]), field
  end
end
if single and (others or single[CREATED] + single[LEASE] <= now
  or (single[FLAGS] or ""):find("[efjmo]")
  or (single[BY] or "") ~= "" or (single[AFTER] or "") ~= "") then single = nil end

-- Add the values that were left out, up to this one, so that it can be set.
local function fill_up_to(place)
  for n = #single + 1, place do
    local is_number = n == WINDOW_ENDS or n == ETA or n == DUPLICATES or n == LAST
      or n == DELIVERY_LEASE
    single[n] = is_number and 0 or ""
  end
end

