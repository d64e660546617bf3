-- stored: the time, and what is stored under the key. It defines no function: a server creates each
-- function of a script in every run, so the fast path of a script comes before the first one.
--
-- KEYS[1]  the record of the key: a hash with a field t:<id> per task, m:<id> per mark, token,
--          n, the name of its tasks, and f, while there are followers: when they are due, which
--          worker reaps them, which task each group follows and its size, which are promoted.
--          m: alone, while there are marks beside the record: until when, and how many
-- Expects  offset, the clock offset in ms
-- Defines  key, clock, now, stored (the fields in order), and the places of a task's values by name
local STATE, CREATED, LEASE, WINDOW_ENDS, ETA, KEEP, DUPLICATES, LAST = 2, 3, 4, 6, 7, 8, 9, 10
local DELIVERY, DELIVERY_LEASE, TOKEN, FLAGS, BY, AFTER, ARGUMENTS = 11, 12, 13, 14, 15, 16, 17
local NAME, SINCE, HELD = 5, 18, 19
local key = KEYS[1]
local clock, stored = redis.call("TIME"), redis.call("HGETALL", key)
local now = clock[1] * 1000 + math.floor(clock[2] / 1000) + offset
