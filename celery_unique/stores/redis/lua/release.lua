-- release: an operator releases the live tasks of the key, or one of them.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, or "" for all, 3 the lease of a task that waits, which is
--          released only if that is unchanged, or 0 for any (times in ms)
-- Returns  how many were released
local offset, only, lease = ARGV[1] + 0, ARGV[2], ARGV[3] + 0
-- @include entries
-- @include record
-- @include follower_groups

local count = 0
for i = 1, #stored, 2 do
  local field, task = stored[i], record[stored[i]]
  local wanted = task and task[LEASE] and (only == "" or field == "t:" .. only)
  if wanted and lease > 0 then wanted = task[LEASE] == lease and task[STATE]:find("[wt]") end
  if wanted and not task[FLAGS]:find("o") then
    count = count + 1
    if task[STATE]:find("[cdx]") and not task[FLAGS]:find("e") then
      write(field, nil)
    else
      task[FLAGS] = task[FLAGS] .. "o"  -- it stays: the holder must still be able to finish
      write(field, task)
    end
  end
end
if count > 0 then set_due_time() end
return count
