-- payload: the values of merged calls, a line for each, by the task that runs with them.
--
-- A field m:<id> of payloads_key says of a task: how many chunks, how long all values are, and until
-- when. A field <n>:<id> is a chunk: lines in the order of their calls. So a line is added without
-- reading the others. The field u says when all of it expires.
-- Expects  record (with CHUNK and KEPT), and payloads_key: nil where the caller has not named it, and nothing is changed
-- Defines  payload_of, payload_text, append_payload, keep_payload, drop_payload, move_payload,
--          remove_line, has_line

-- How many chunks, and how long all values are.
local function payload_of(id)
  local facts = payloads_key and redis.call("HGET", payloads_key, "m:" .. id)
  if not facts then return 0, 0, 0 end
  local chunks, size, deadline = facts:match("^(%d+) (%d+) (%d+)$")
  if deadline + 0 <= now then return 0, 0, 0 end
  return chunks + 0, size + 0, deadline + 0
end

local function put_payload_facts(id, chunks, size, deadline)
  redis.call("HSET", payloads_key, "m:" .. id, string.format("%d %d %.0f", chunks, size, deadline))
  if deadline > (redis.call("HGET", payloads_key, "u") or 0) + 0 then
    redis.call("HSET", payloads_key, "u", string.format("%.0f", deadline))
    redis.call("PEXPIREAT", payloads_key, deadline - math.min(offset, 0))
  end
end

local function kept_until(task) return math.max(task[LEASE], task[ETA]) + KEPT end

local function payload_text(id)
  local chunks, text = payload_of(id), {}
  for n = 1, chunks do text[n] = redis.call("HGET", payloads_key, n .. ":" .. id) or "" end
  return table.concat(text)
end

local function drop_payload(id)
  if not payloads_key then return end
  for n = 1, payload_of(id) do redis.call("HDEL", payloads_key, n .. ":" .. id) end
  redis.call("HDEL", payloads_key, "m:" .. id)
  if redis.call("HLEN", payloads_key) == 1 then redis.call("DEL", payloads_key) end
end

local function append_payload(id, task, lines, size)
  local chunks, before, deadline = payload_of(id)
  local last = chunks > 0 and redis.call("HGET", payloads_key, chunks .. ":" .. id) or ""
  if chunks == 0 or #last + #lines > CHUNK then chunks, last = chunks + 1, "" end
  redis.call("HSET", payloads_key, chunks .. ":" .. id, last .. lines)
  put_payload_facts(id, chunks, before + size, math.max(deadline, kept_until(task)))
end

-- The lease of the task has changed.
local function keep_payload(id, task)
  local chunks, size, deadline = payload_of(id)
  if chunks > 0 and kept_until(task) > deadline then
    put_payload_facts(id, chunks, size, kept_until(task))
  end
end

-- Another task runs with the payload.
local function move_payload(id, other, task)
  local _, size, deadline = payload_of(id)
  local text = payload_text(id)
  if text == "" or id == other then return end
  drop_payload(id)
  append_payload(other, task, text, size)
  local chunks, all, other_deadline = payload_of(other)
  if deadline > other_deadline then put_payload_facts(other, chunks, all, deadline) end
end

local function has_line(id, line_head)
  local text = payload_text(id)
  return text:sub(1, #line_head) == line_head or text:find("\n" .. line_head, 1, true) ~= nil
end

local function remove_line(id, line_head)
  local chunks, size, deadline = payload_of(id)
  for n = 1, chunks do
    local text = redis.call("HGET", payloads_key, n .. ":" .. id) or ""
    local from = text:sub(1, #line_head) == line_head and 1 or nil
    if not from then
      local found = text:find("\n" .. line_head, 1, true)
      from = found and found + 1
    end
    if from then
      local to = text:find("\n", from, true)
      redis.call("HSET", payloads_key, n .. ":" .. id, text:sub(1, from - 1) .. text:sub(to + 1))
      put_payload_facts(id, chunks, size - (to - from + 1 - #line_head - 2), deadline)
      return true
    end
  end
  return false
end
