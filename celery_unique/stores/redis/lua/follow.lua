-- follow: the task of a message in hand becomes a follower of another task, or of what took the
-- place of that. Where that one is gone, it is an orphan at once.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     as of acquire: 2 task id, 3 task name, 6 window or 0, 8 letters of the final states to
--          keep, 9 arguments, 10 how long an ended task is kept or 0, 14 its message; and 12 the id
--          of the task that it is to follow
-- Returns  1 it follows, 0 no effect: its id is a task of the key
local id, holder, kept = ARGV[2], ARGV[12], tonumber(ARGV[10])

if record["t:" .. id] then return 0 end
-- Not for ever: an orphan follows another task of the key when it is looked after.
local seen, mark, steps = {[id] = true}, mark_of(holder), 0
while mark and (mark[3] or "") ~= "" and not seen[mark[3]] and steps < 100 do
  seen[holder], holder, steps = true, mark[3], steps + 1
  mark = mark_of(holder)
end
if kept == 0 then kept = tonumber(ARGV[6]) end
attach(id, holder, {"", now, ARGV[3], ARGV[8], kept, ARGV[9]}, ARGV[14])
return 1
