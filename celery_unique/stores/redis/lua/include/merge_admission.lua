-- merge_admission: what becomes of a call that is merged. Returns the task that takes its values, or
-- that blocks it; else leaves to the script what is created.
--
-- Expects  payload, as blockers, and of the call: line_head, values, max_bytes
-- Defines  as blockers; after (field of the task that it comes after, or nil), and values of the new
--          task: ends, eta, flags; begin_payload
-- @include blockers
-- The attempt is repeated, and has merged its values before.
for i = 1, again and #stored or 0, 2 do
  local task, other = record[stored[i]], stored[i]:sub(3)
  if task and task[LEASE] and other ~= id and task[FLAGS]:find("p") and has_line(other, line_head) then
    return blocked_by(other, "merged")
  end
end

-- The task after which a new one would run: the newest that has not ended, and what succeeds that.
if number < limit then active, waiting = nil, {} end
local after = waiting[#waiting]
if active and (not after or record[active][CREATED] >= record[after][CREATED]) then after = active end
for _ = 1, #waiting do
  local successor = nil
  for _, field in ipairs(waiting) do
    if record[field][AFTER] == after:sub(3) then successor = field end
  end
  if not successor then break end
  after = successor
end

local itself = own and not own[STATE]:find("[cdx]")
local target = itself and "t:" .. id or not final and after or nil
if target then
  local holder, holder_id = record[target], target:sub(3)
  local chunks, size = payload_of(holder_id)
  -- Not where Redis has evicted the payload: what the call adds would run without the values in the
  -- message.
  local takes = holder[FLAGS]:find("p") and holder[STATE]:find("[pw]") and (itself or chunks > 0)
    and holder[NAME] == name and holder[ARGUMENTS] == arguments and size + #values <= max_bytes
  if takes then
    holder[DUPLICATES], holder[LAST] = holder[DUPLICATES] + 1, now
    if delay > 0 and holder[ETA] > now then
      local postponed = now + delay
      if max_wait > 0 then postponed = math.min(postponed, holder[CREATED] + max_wait) end
      if postponed > holder[ETA] then
        -- Pending, its lease is the grace of its publish.
        if holder[STATE] == "w" then holder[LEASE] = holder[LEASE] + postponed - holder[ETA] end
        holder[ETA] = postponed
      end
    end
    write(target, holder)
    append_payload(holder_id, holder, line_head .. values .. "]\n", #values)
    if message == "" or itself then return blocked_by(holder_id, "merged") end
    attach(id, holder_id, {"", now, name, keep, kept, arguments}, message)
    return blocked_by(holder_id, "joined")
  end
end
if itself or final then
  local blocker = itself and "t:" .. id or final
  record[blocker][DUPLICATES], record[blocker][LAST] = record[blocker][DUPLICATES] + 1, now
  write(blocker, record[blocker])
  return blocked_by(blocker:sub(3), "")
end
local ends, eta = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0
-- An older message of this id may still arrive: drop the mark, record that there may be two.
local flags = in_canvas .. ((own or mark) and "m" or "") .. "p"

-- The task is recorded: its own values are the first of its payload.
local function begin_payload()
  for i = 1, #stored, 2 do
    local task = record[stored[i]]
    if task and task[LEASE] and task[AFTER] == id then  -- of an earlier task with this id
      task[AFTER] = ""
      write(stored[i], task)
    end
  end
  if again and has_line(id, line_head) then  -- its grace has passed: others were merged into it
    keep_payload(id, record["t:" .. id])
    return
  end
  drop_payload(id)  -- of an earlier task with this id
  append_payload(id, record["t:" .. id], line_head .. values .. "]\n", #values)
end
