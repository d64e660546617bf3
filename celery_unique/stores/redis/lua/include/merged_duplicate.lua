-- merged_duplicate: fast path of a merged call, before the first function. Nearly every such call
-- meets one task that waits, alone or behind the one that runs, and nothing else is stored under the
-- key. Read and written as text, as cjson would; the lines are those of payload.
--
-- Expects  stored, payloads_key, and of the call: line_head, values, max_bytes, again, and its
--          arguments by name
-- Defines  nothing: returns the task that takes the values as text: created_at, its lease from there
--          on, now, ETA or 0, letter of its state, id; or leaves the call to the full path
if #stored <= 8 and not again and strategy == "merge" and message == "" and arguments == "" then
  local shared, waits, task, runs, run, more = nil, nil, nil, nil, nil, false
  for i = 1, #stored, 2 do
    local field, value = stored[i], stored[i + 1]
    if field == "n" then
      shared = value
    elseif field ~= "token" then
      if field:sub(1, 2) ~= "t:" or field == "t:" .. id then
        more = true
      elseif value:sub(1, 6) == '[1,"r"' then
        more, runs, run = more or run, field, value
      else
        more, waits, task = more or task, field, value
      end
    end
  end
  local letter, since, held_for, ends, eta, keep, counted, flags, rest
  if task and not more and shared == name then
    letter, since, held_for, ends, eta, keep, counted, flags, rest = task:match(
      '^%[1,"([pw])",(%d+),(%d+),"",(%d+),(%d+),("[^"\\]*"),(%d+),%d+,"",0,"","([cm]*p[cm]*)"(.*)%]$')
  end
  local until_then = 0  -- when the lease of the one that runs ends
  if letter and run then
    local began, run_for = run:match('^%[1,"r",(%d+),(%d+),"",%d+,%d+,"[^"\\]*",%d+,%d+,'
      .. '"[^"\\]*",%d+,"%d+","[cmp]*"%]$')
    until_then = began and began + run_for or 0
    -- The other waits for its end, so that is the last in line.
    if until_then <= now or rest ~= ',"","' .. runs:sub(3) .. '"' then letter = nil end
  elseif rest ~= "" then
    letter = nil
  end
  if letter and since + held_for > now and (window == 0 or since + window > now) then
    local holder, lease, due = waits:sub(3), since + held_for, eta + 0
    local waiting = due > now and "s" or "w"
    -- A pending task also counts as what it is about to become.
    local counts = states:find(waiting, 1, true)
      or (letter == "p" and states:find("p", 1, true))
    local facts = counts and redis.call("HGET", payloads_key, "m:" .. holder)
    local chunks, size, deadline
    if facts then chunks, size, deadline = facts:match("^(%d+) (%d+) (%d+)$") end
    -- @include keeping
    if chunks and chunks + 0 > 0 and deadline + 0 > now and size + #values <= max_bytes then
      if delay > 0 and due > now then
        local postponed = now + delay
        if max_wait > 0 then postponed = math.min(postponed, since + max_wait) end
        if postponed > due then
          -- Pending, its lease is the grace of its publish.
          if letter == "w" then
            lease = lease + postponed - due
            redis.call("PEXPIREAT", key, math.max(lease, until_then) - math.min(offset, 0))
          end
          due = postponed
        end
      end
      held_for = lease - since
      redis.call("HSET", key, waits, '[1,"' .. letter .. '",' .. since .. "," .. held_for .. ',"",'
        .. ends .. "," .. due .. "," .. keep .. "," .. counted + 1 .. "," .. now .. ',"",0,"","'
        .. flags .. '"' .. rest .. "]")

      local line = line_head .. values .. "]\n"
      local text = redis.call("HGET", payloads_key, chunks .. ":" .. holder) or ""
      if #text + #line > CHUNK then chunks, text = chunks + 1, "" end
      local kept_until = math.max(lease, due) + KEPT
      if kept_until > deadline + 0 then
        deadline = kept_until
        if deadline > (redis.call("HGET", payloads_key, "u") or 0) + 0 then
          redis.call("HSET", payloads_key, "u", deadline)
          redis.call("PEXPIREAT", payloads_key, deadline - math.min(offset, 0))
        end
      end
      redis.call("HSET", payloads_key, chunks .. ":" .. holder, text .. line,
        "m:" .. holder, chunks .. " " .. size + #values .. " " .. deadline)
      if letter == "w" and due > now then letter = "s" end
      return since .. " " .. held_for .. " " .. now .. " " .. due .. " " .. letter .. " " .. holder
    end
  end
end
