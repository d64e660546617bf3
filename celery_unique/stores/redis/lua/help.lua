-- help: may a duplicate publish a copy of the message under the holder's id? Yes if the holder is
-- pending, or waits and the process that held its message is believed dead.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id of the holder, 3 for how long no other caller may, in the
--          second case (times in ms)
-- Returns  "go" (recorded: there may be two messages), "again" (acquire again: the holder is
--          gone, released, in limbo or in a canvas), "published" (nothing to do)
local offset, id, claim = ARGV[1] + 0, ARGV[2], ARGV[3] + 0
-- @include entries
-- @include record

local task, mark = record["t:" .. id], mark_of(id)
if not task then return mark and mark[1] == "done" and "published" or "again" end
local abandoned = is_abandoned(task)
if task[STATE] ~= "p" and not abandoned then return "published" end
-- A copy would run under a lock that blocks no call, or without the callbacks of a canvas.
if task[FLAGS]:find("[oc]") or in_limbo(task) then return "again" end
if not task[FLAGS]:find("m") then task[FLAGS] = task[FLAGS] .. "m" end
if abandoned then task[HELD] = now + claim end
write("t:" .. id, task)
return "go"
