-- waiting_duplicate: fast path of a plain call that one waiting task blocks, which has only the
-- values that every task has, and the count of its duplicates. Read and written as text, as cjson
-- would.
--
-- Expects  stored, and the arguments of the call by name
-- Defines  nothing: returns the task that blocks the call as text, which takes half the time of a
--          list: created_at, its lease from there on, now, id; or leaves the rest to other paths
if #stored == 4 and stored[1] == "n" and message == ""
  and (strategy == "ignore" or strategy == "reject") then
  local field, holder = stored[3], stored[3]:sub(3)
  local since, held_for, counted = stored[4]:match('^%[1,"w",(%d+),(%d+)(.*)%]$')
  local duplicates = counted == "" and 0 or counted and counted:match('^,"",0,0,"",(%d+),%d+$')
  if duplicates and since + held_for > now and states:find("w", 1, true) and holder ~= id
    and (window == 0 or since + window > now) then
    local at = now .. ""  -- once: to write a number takes as long as a short command
    redis.call("HSET", key, field, '[1,"w",' .. since .. "," .. held_for .. ',"",0,0,"",'
      .. duplicates + 1 .. "," .. at .. "]")  -- its expiry does not change
    return since .. " " .. held_for .. " " .. at .. " " .. holder
  end
end

