"""The worker's side: the gate before a body, the body, its end, and renewing leases."""
