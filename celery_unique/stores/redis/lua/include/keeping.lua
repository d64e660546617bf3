-- keeping: how long followers are kept beyond the time at which they are due, and payloads beyond the
-- leases of their tasks; and from which length on a chunk of a payload gets no more lines. A call that
-- is merged copies its chunk, a start reads each: shorter ones cost the first less, the other more.
--
-- Defines  KEPT, CHUNK
local KEPT, CHUNK = 259200000, 2048
