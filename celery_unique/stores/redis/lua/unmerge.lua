-- unmerge: remove the values of a call from a task that has not started.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks
-- ARGV     1 clock offset, 2 id of the call, 3 how its line in a payload begins (times in ms)
-- Returns  1 removed, 0 there was none
local offset, id, line_head = ARGV[1] + 0, ARGV[2], ARGV[3]
local payloads_key = KEYS[5]
-- @include entries
-- @include record
-- @include payload

for i = 1, #stored, 2 do
  local task, other = record[stored[i]], stored[i]:sub(3)
  local unstarted = task and task[LEASE] and task[STATE]:find("[pw]") and other ~= id
  if unstarted and task[FLAGS]:find("p") and remove_line(other, line_head) then return 1 end
end
return 0
