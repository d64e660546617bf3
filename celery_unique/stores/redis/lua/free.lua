-- free: stands between the entries and the prelude of acquire. Nearly every new call finds nothing
-- under its key: then nothing is in the way, and nothing has to be looked after.
--
-- KEYS, ARGV and what is returned are those of acquire
if #stored == 0 then
  local name, grace = ARGV[3], tonumber(ARGV[5])
  local window, delay, kept = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[10])
  if kept == 0 then kept = window end
  local ends, eta = kept > 0 and now + kept or 0, delay > 0 and now + delay or 0
  local task
  if ends == 0 and eta == 0 and ARGV[8] == "" and ARGV[9] == "" and ARGV[15] == "" then
    task = cjson.encode({1, "p", now, grace})
  else
    task = packed({1, "p", now, now + grace, name, ends, eta, ARGV[8], 0, 0, "", 0, "", ARGV[15], "", "",
      ARGV[9], 0}, name)
  end
  redis.call("HSET", key, "n", name, "t:" .. ARGV[2], task)
  expire_at(now + grace)
  if eta == 0 then return now end
  return {now, eta, ""}
end

