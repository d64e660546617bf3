-- reap: claim the orphans of the key, followers that no other process will complete, for a reaper.
--
-- KEYS     1 the record of the key, 2 its followers, 3 the bucket's due set, 4 more of its marks
-- ARGV     1 clock offset, 2 name of the reaper, 3 how long its claim lasts, 4 how many to return
--          at most (times in ms)
-- Returns  {id, id of its holder, kind of the holder's end or "", its stored value, and so on for
--          the next}: promoted ones first, then oldest first. In front of them, for each parked
--          call that has its turn: {id, "again" or "first", "called", a line break and its message}
local offset, reaper = ARGV[1] + 0, ARGV[2]
local claim, most = ARGV[3] + 0, ARGV[4] + 0
-- @include entries
-- @include record
-- @include follower_groups
-- @include members

if not following then redis.call("ZREM", due_key, key) end
local reply, called = {}, call_parked() or {}
for n = 1, #called, 3 do
  local again = called[n + 1] == 1 and "again" or "first"
  for _, each in ipairs({called[n], again, "called", "\n" .. called[n + 2]}) do
    reply[#reply + 1] = each
  end
end
if #called > 0 then set_due_time() end
if not following or (following.u > now and following.r ~= reaper) then return reply end
local lost, unconfirmed = {}, {}
for name, group in pairs(following.g) do
  if orphaned_at(group[1]) <= now then lost[name] = true end
end
for id in pairs(following.p) do
  if orphaned_at(id) <= now then unconfirmed[id] = true end
end
local found, there = members(lost, unconfirmed), {}
for _, each in ipairs(found) do there[each[2][GROUP] == "" and ":" .. each[1] or each[2][GROUP]] = true end
-- Groups whose followers the server has evicted must not stay due.
for name in pairs(lost) do
  if not there[name] then following.g[name] = nil end
end
for id in pairs(unconfirmed) do
  if not there[":" .. id] then following.p[id] = nil end
end
if #found > 0 then following.r, following.u = reaper, now + claim end
set_due_time()
table.sort(found, function(one, other)
  local a, b = one[2], other[2]
  if (a[GROUP] == "") ~= (b[GROUP] == "") then return a[GROUP] == "" end
  if a[JOINED] ~= b[JOINED] then return a[JOINED] < b[JOINED] end
  return one[1] < other[1]
end)
for n = 1, math.min(#found, most) do
  local id, facts, value = unpack(found[n])
  local holder = holder_of(id, facts)
  local mark, task = mark_of(holder), record["t:" .. holder]
  local fate = mark and kind_of(mark) or task and task[STATE]:find("[cdx]") and "done" or ""
  for _, each in ipairs({id, holder, fate, value}) do reply[#reply + 1] = each end
end
return reply
