"""What tests that are not about time-outs allow a store on a busy machine.

A worker whose store is silent for a quarter of a second at the gate runs the task without asking,
which is right, and not what such a test is about. With several test processes on two cores a
healthy server is silent for longer now and then; a call has half a second to connect.
"""

from __future__ import annotations

PATIENT = {"unique_gate_timeout": 5, "unique_store_timeout": 10}
