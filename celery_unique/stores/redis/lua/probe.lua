-- probe: the task that blocks a call which is neither to replace nor to follow it. Creates nothing.
--
-- KEYS     1 the record of the key
-- ARGV     1 clock offset, 2 letters of the call's states, 3 window or 0, 4 id of the calling task or
--          "" (times in ms)
-- Returns  as acquire where a task blocks the call; 0: nothing is stored under the key; nil: probe
--          with acquire
local offset, states, window, parent = ARGV[1] + 0, ARGV[2], ARGV[3] + 0, ARGV[4]
local id, strategy, message = "", "ignore", ""
-- @include stored
if #stored == 0 then return 0 end
-- @include waiting_duplicate
-- @include single_task
-- @include plain_duplicate
return false
