-- follow: the task of a message in hand becomes a follower of another task, or of what took the
-- place of that. Where that one is gone, it is an orphan at once.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set
-- ARGV     as of acquire: 2 task id, 3 task name, 6 window or 0, 8 letters of the final states to
--          keep, 9 arguments, 10 how long an ended task is kept or 0, 14 its message; and 12 the id
--          of the task that it is to follow
-- Returns  1 it follows, 0 no effect: its id is a task of the key
local id, holder, kept = ARGV[2], ARGV[12], tonumber(ARGV[10])

if record["t:" .. id] then return 0 end
local seen, mark = {[id] = true}, record["m:" .. holder]
while mark and (mark[3] or "") ~= "" and not seen[mark[3]] do
  seen[holder], holder = true, mark[3]
  mark = record["m:" .. holder]
end
if kept == 0 then kept = tonumber(ARGV[6]) end
attach(id, holder, {"", now, ARGV[3], ARGV[8], kept, ARGV[9]}, ARGV[14])
return 1
