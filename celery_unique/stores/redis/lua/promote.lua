-- promote: decide what becomes of an orphan whose holder left no result.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 id of the follower, 3 name of the reaper, 4 grace, 5 how long a
--          mark stays (times in ms), 6 how its line in a payload begins
-- Returns  "follows" (another task of the key, as all orphans of its holder do), "publish" (it is
--          a pending task now), "gone" (no orphan any more, or claimed by another reaper)
local offset, id, reaper = ARGV[1] + 0, ARGV[2], ARGV[3]
local grace, mark_for, line_head = ARGV[4] + 0, ARGV[5] + 0, ARGV[6]
local payloads_key = KEYS[5]
-- @include entries
-- @include record
-- @include follower_groups
-- @include payload

local facts, message = follower(id)
local holder = holder_of(id, facts)
if not holder or (following.u > now and following.r ~= reaper) then return "gone" end
if facts[PARKED] then return "gone" end  -- it waits for its turn, and for no task
local promoted = facts[GROUP] == ""
if orphaned_at(holder) > now then
  if not promoted then return "follows" end
  -- This reaper promoted it before and may have lost the reply: publish it again.
  return following.r == reaper and following.u > now and "publish" or "gone"
end

-- Another task whose outcome can be the follower's: one that runs, else one that waits, else
-- one that has ended; the newest of them.
local function rank(task)
  if task[STATE] == "r" then return 3 end
  if not task[STATE]:find("[cdx]") then return 2 end
  local abandoned = task[FLAGS]:find("e") and task[DELIVERY_LEASE] <= now
  return (task[STATE] == "x" or abandoned) and 0 or 1
end
local name, keep, kept, arguments = facts[3], facts[4], facts[5], facts[6]
local other
for field, task in pairs(record) do
  local each = field:sub(3)
  local fits = task[LEASE] and rank(task) > 0 and task[ARGUMENTS] == arguments
    and not task[FLAGS]:find("o") and each ~= id and each ~= holder and not in_limbo(task)
  if fits then
    local best = other and record["t:" .. other]
    local by = best and rank(task) - rank(best) or 1
    if by == 0 then by = task[CREATED] - best[CREATED] end
    if by > 0 or (by == 0 and each > other) then other = each end
  end
end

-- A call that was merged into its holder: another task's outcome is its own only if that takes its
-- values.
local merged, follows = has_line(holder, line_head), other
if other and merged then
  local task = record["t:" .. other]
  follows = task[FLAGS]:find("p") and task[STATE]:find("[pw]") and other
end
if follows then
  follow_instead(holder, other)
  if merged then move_payload(holder, other, record["t:" .. other]) end
  if promoted then
    -- Its message may be published: the gate drops it, since the result comes from the other.
    write("t:" .. id, nil)
    put_mark(id, {"done", now + mark_for})
    move(id, other)
  end
  set_due_time()
  return "follows"
end
write("t:" .. id, {1, "p", now, now + grace, name, kept > 0 and now + kept or 0, 0, keep, 0, 0, "",
  0, "", merged and "mp" or "m", "", merged and other or "", arguments, 0})
if merged then move_payload(holder, id, record["t:" .. id]) end
drop_mark(id)  -- it would drop the message at the gate
leave_group(id, facts)
following.p[id] = now
facts[GROUP] = ""
-- It stays until it is confirmed: its publisher may die before.
redis.call("HSET", followers_key, id, cjson.encode(facts) .. "\n" .. message)
follow_instead(holder, id)
set_due_time()
return "publish"
