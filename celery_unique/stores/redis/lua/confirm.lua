-- confirm: the message is published, so a pending task becomes available, and the tasks that it
-- replaces are removed. Changes nothing else and creates nothing: it may arrive after the end.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 task id, 3 lease, from the ETA where there is one (times in ms)
-- Returns  1 confirmed, 0 no effect (fire-and-forget: the reply is not used)
local offset, id, lease = ARGV[1] + 0, ARGV[2], ARGV[3] + 0
-- @include entries

-- Fast path: the task is the only one, so it replaces none.
if #stored == 0 then return 0 end
-- @include single_task
if single and single_field == "t:" .. id then
  if single[STATE] ~= "p" then return 0 end
  local deadline = math.max(now, single[ETA] or 0) + lease
  single[STATE], single[LEASE] = "w", deadline - single[CREATED]
  redis.call("HSET", key, single_field, cjson.encode(single))
  expire_at(deadline)
  return 1
end

-- Full path.
-- @include record
-- @include follower_groups
local field = "t:" .. id
local task = record[field]
if not task or task[STATE] ~= "p" then return 0 end
task[STATE], task[LEASE] = "w", math.max(now, task[ETA]) + lease
write(field, task)
finalise(id, now + lease)
stop_following(id)  -- it was promoted, and its message is published
set_due_time()
return 1
