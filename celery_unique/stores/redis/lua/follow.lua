-- follow: the task of a received message becomes a follower of another task, or of the one that
-- replaced that. Where that task is gone, the follower is an orphan immediately.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 task name, 4 letters of the final states to keep, 5 how
--          long from its creation an ended task is kept or 0, 6 arguments, 7 its message, 8 id of
--          the task to follow, 9 when the task of the message was created or 0 (times in ms)
-- Returns  1 it follows, 0 no effect: its id is a task of the key
local offset, id, name, keep = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local kept, arguments, message, holder = ARGV[5] + 0, ARGV[6], ARGV[7], ARGV[8]
local created_at = ARGV[9] + 0
-- @include entries
-- @include record
joins = true
-- @include follower_groups

if record["t:" .. id] then return 0 end
-- Bounded: the reaper lets an orphan follow another task of the key.
local seen, mark, steps = {[id] = true}, mark_of(holder), 0
while mark and (mark[3] or "") ~= "" and not seen[mark[3]] and steps < 100 do
  seen[holder], holder, steps = true, mark[3], steps + 1
  mark = mark_of(holder)
end
-- The message of a replacement in between may have been reached first, and its mark be gone: then it
-- is the newest task that was created later.
if not mark and not record["t:" .. holder] and created_at > 0 then
  local newest
  for field, task in pairs(record) do
    local each = field:sub(3)
    local fits = task[LEASE] and task[CREATED] >= created_at and task[ARGUMENTS] == arguments
      and not in_limbo(task) and orphaned_at(each) > now
    local best = fits and newest and record["t:" .. newest]
    if fits and (not best or task[CREATED] > best[CREATED]
        or (task[CREATED] == best[CREATED] and each > newest)) then
      newest = each
    end
  end
  holder = newest or holder
end
attach(id, holder, {"", now, name, keep, kept, arguments}, message)
return 1
