-- confirm_alone: confirm, for a task that was admitted with nothing to add: it stands in for no
-- other, comes after none and was no follower, so that nothing but its own entry has to change.
-- Stands alone, without the prelude: this is sent whole with every publish, and so it is short.
--
-- KEYS     1 the record of the key
-- ARGV     1 clock offset, 2 task id, 3 lease, from the ETA where there is one (times in ms)
-- Returns  1 confirmed, 0 no effect (one way: nobody reads it)
local key, field, offset = KEYS[1], "t:" .. ARGV[2], tonumber(ARGV[1])
local clock, stored = redis.call("TIME"), redis.call("HGET", key, field)
local task = stored and cjson.decode(stored)
if not task or task[2] ~= "p" then return 0 end
local now = clock[1] * 1000 + math.floor(clock[2] / 1000) + offset
if task[3] + task[4] <= now then return 0 end
local lease = math.max(now, task[7] or 0) + tonumber(ARGV[3])
task[2], task[4] = "w", lease - task[3]
redis.call("HSET", key, field, cjson.encode(task))
-- Others may have joined the record meanwhile: it never expires sooner than it would have.
local expires = lease - math.min(offset, 0)
if now - offset + redis.call("PTTL", key) < expires then redis.call("PEXPIREAT", key, expires) end
return 1
