-- sole_run: for the fast path of an end, before the first function. Nearly every task that ends is the
-- only one of its key, has only the values that every running task has, and nothing of it stays.
--
-- Expects  stored, and the arguments of finish by name
-- Defines  field, that of the task; answered, how many duplicates such a task has had, as text; nil for
--          any other, and where settle follows
local field, running, answered = "t:" .. id, nil, nil
for i = 1, #stored, 2 do
  if stored[i] == field then
    running = stored[i + 1]
  elseif stored[i] ~= "n" and stored[i] ~= "token" then
    running = nil
    break
  end
end
if running and not settle_later then
  local since, held_for, number, runs_it = running:match(
    '^%[1,"r",(%d+),(%d+),"",0,0,"",(%d+),%d+,"(.-)",%d+,"%d+"%]$')
  if runs_it == delivery and since + held_for > now then answered = number end
end
