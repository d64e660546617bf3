-- cancel: revoke a task that has not started, or whose delivery is dead.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 task id, 3 how long the mark stays (times in ms)
-- Returns  "cancelled" (removed if it was there, and marked revoked), "active" (no effect)
local offset, id, mark_for = ARGV[1] + 0, ARGV[2], ARGV[3] + 0
-- @include entries
-- @include record
-- @include follower_groups
local payloads_key = KEYS[5]
-- @include payload

local task = record["t:" .. id]
local alive = task and task[STATE] == "r" and task[DELIVERY_LEASE] > now
if alive or (task and task[STATE]:find("[cdx]")) then return "active" end
local mark = mark_of(id)
-- A call that has its turn, and may not be published, is completed by the reaper, too.
local follows = (not task or is_parked(id)) and follower(id)
-- It has ended: a second message of it is not a revoked task.
if mark and mark[1] == "done" and not follows then return "active" end
local kind = mark and is_lasting(mark) and "revoked" .. LASTING or kind_for(task, "revoked")
put_mark(id, {kind, math.max(now + mark_for, mark and mark[2] or 0)})
if task then
  restore_replaced(id, now + mark_for)
  if task[FLAGS]:find("p") then drop_payload(id) end
  write("t:" .. id, nil)
  if not follows then stop_following(id) end
end
if follows then move(id, id) end  -- it follows itself, so that the reaper finds it revoked
set_due_time()
return "cancelled"
