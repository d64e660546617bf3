-- fill_up: adds to a single task the values that were left out, up to the one that is to be set.
--
-- Expects  single_task
-- Defines  fill_up_to
local function fill_up_to(place)
  for n = #single + 1, place do
    local is_number = n == WINDOW_ENDS or n == ETA or n == DUPLICATES or n == LAST
      or n == DELIVERY_LEASE
    single[n] = is_number and 0 or ""
  end
end

