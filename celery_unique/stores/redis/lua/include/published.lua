-- published: how a script records a task whose message it pushes.
--
-- Expects  follower_groups, push
-- Defines  published, readmit
if mark_of(attempt) then return redis.error_reply("WITHDRAWN the call was withdrawn") end

-- Push the message of the task and record that.
local function published(task, reply)
  local replaces = type(reply) == "table" and #reply > 3
  local refused = push(task[AFTER] ~= "" and "rerun" or replaces and "replaced" or "")
  if refused then return refused end
  task[STATE], task[LEASE] = "w", math.max(now, task[ETA]) + lease
  write("t:" .. id, task)
  drop_mark(id)
  finalise(id, now + lease)
  stop_following(id)
  set_due_time()
  put_receipt(reply)
  return reply
end
local function readmit(own, created)
  if own[STATE] ~= "p" then
    -- There is no receipt: it is the task of another attempt, on which this call depends, too.
    own[DUPLICATES] = own[DUPLICATES] + 1
    write("t:" .. id, own)
    return created()
  end
  -- It was acquired in two steps or promoted, so its message may have been published too.
  if not own[FLAGS]:find("m") then own[FLAGS] = own[FLAGS] .. "m" end
  return published(own, created())
end
