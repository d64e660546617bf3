-- beyond_limit: what blocks a call whose limit is more than one task, or that is parked instead of
-- refused.
--
-- Expects  admission, with what it has found
-- Defines  nothing: changes newest, active, caller and waiting to what still blocks the call, or is
--          to be replaced; or returns that the call is parked
local function nothing_blocks() newest, active, caller, waiting = nil, nil, nil, {} end
if queues and (parked_before or not itself) then
  local function in_lane(outcome)
    local lane, found = following and following.q, active or newest
    local reply = found and blocked_by(found:sub(3), outcome)
      or {"", "p", 0, 0, "", now, outcome, 0, 0}
    reply[10] = lane and lane.n or 0
    return reply
  end
  if parked_before then return in_lane("queued") end
  if number < limit and not lane_waits() then
    nothing_blocks()
    final = nil
  else
    if max_queue > 0 and following and following.q and following.q.n >= max_queue then
      return in_lane("full")
    end
    -- An older message of this id may still arrive: drop the mark, record that there may be two.
    local known = (own or mark) and "m" or ""
    if mark then drop_mark(id) end
    local reply = in_lane("queued")
    if own then write("t:" .. id, nil) end
    local eta = delay > 0 and now + delay or 0
    stop_following(id)
    park(id, {"", now, name, keep, kept, arguments},
      {0, states, window, limit, parked_grace, eta, in_canvas .. known}, message)
    set_due_time()
    reply[10] = following.q.n
    put_receipt(cjson.encode(reply))
    return reply
  end
elseif not itself and not final then
  if number < limit then
    nothing_blocks()
  elseif replaces then
    -- The oldest make room. Those that have ended need none.
    local over = math.max(0, running + #waiting - limit + 1)
    if over <= #waiting then
      while #waiting > over do table.remove(waiting) end
      newest, active, caller = waiting[#waiting], nil, nil
    end
  elseif strategy == "rerun" and not caller and running < limit then
    newest, active = waiting[#waiting] or newest, nil
  else
    local successors = {}
    for _, field in ipairs(waiting) do
      if record[field][AFTER] ~= "" then successors[#successors + 1] = field end
    end
    waiting = successors
  end
end
