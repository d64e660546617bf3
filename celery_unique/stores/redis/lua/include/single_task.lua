-- single_task: for the fast path of a script. Nearly every record is that of one live task and
-- nothing else: no mark, no follower, no task that it replaces or waits for.
--
-- Expects  stored
-- Defines  single, the values of that task as they are stored: without the last ones where these
--          are empty, and with a lease that counts from its creation. nil where the record holds
--          more, which the full path handles. single_field, its field
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
  or (single[FLAGS] or ""):find("[efjmop]")
  or (single[BY] or "") ~= "" or (single[AFTER] or "") ~= "") then single = nil end
