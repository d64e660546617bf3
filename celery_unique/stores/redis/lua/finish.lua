-- finish: the body has finished.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks,
--          5 the payloads of its tasks, where it may have one
-- ARGV     1 clock offset, 2 task id, 3 delivery, 4 letter of the final state, 5 retention,
--          6 "1" when settle follows in any case, 7 how long marks stay, 8 how long the
--          delivery is believed alive while it completes followers, 9 token of the start that
--          ends, or "" (times in ms), 10 "1" when the message was rejected: it may be redelivered,
--          and is then to run, 11 "1" when the same end is reported again
-- Returns  the number of duplicates: ended; or {"ended", 1 when settle must follow else 0,
--          duplicates, 1 when followed else 0, and nothing or {id, 1 when it was called before else 0,
--          its message, and so on}: the parked calls that have their turn}, {"not_yours"}
local offset, id, delivery, state = ARGV[1] + 0, ARGV[2], ARGV[3], ARGV[4]
local retention, settle_later, mark_for = ARGV[5] + 0, ARGV[6] == "1", ARGV[7] + 0
local run_lease, token, rejected = ARGV[8] + 0, ARGV[9], ARGV[10] == "1"
local again = ARGV[11] == "1"
local payloads_key = KEYS[5]
-- @include stored
-- @include sole_run
if answered then
  redis.call("DEL", key)
  return answered + 0
end
-- @include packing
-- @include finished
