"""Deterministic simulation: real callers and workers on a simulated broker, store, clock and
scheduler. A seed chooses the workload, the interleaving and the faults, and replays exactly.

``make simulate``, or ``python -m spec.simulation.run --help``.
"""
