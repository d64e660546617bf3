"""How much is measured: in full, for a quick look, and for the test of the harness itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    rounds: int = 400  # of single calls
    many: int = 1_000  # calls in one apply_many or group
    many_rounds: int = 10
    results: int = 200  # calls whose result is waited for
    queued: int = 400  # messages in a queue before a worker gets it
    queue_rounds: int = 9
    lanes: int = 1_000  # keys that run one task at a time
    lane_calls: int = 2_000
    lane_rounds: int = 5
    server_rounds: int = 20  # of acts between two readings of the server's counters
    locks: int = 100_000  # over which a lock's bytes are averaged
    rival_locks: int = 3_000
    held: int = 10_000  # locks that one worker renews
    renewals: int = 7
    growth: tuple[int, ...] = (0, 10_000, 100_000, 1_000_000)
    growth_sql: tuple[int, ...] = (0, 100_000, 1_000_000)
    growth_rounds: int = 10
    growth_calls: int = 60  # of each kind in a round
    growth_results: int = 20  # calls in a round whose result is waited for
    growth_batches: int = 4  # in a round, of a kind that does many at once
    growth_many: int = 200  # calls in one apply_many
    growth_held: int = 1_000  # locks in one renewal


FULL = Sizes()
QUICK = Sizes(
    rounds=100,
    many=300,
    many_rounds=3,
    results=30,
    queued=150,
    queue_rounds=2,
    lane_rounds=2,
    server_rounds=5,
    locks=20_000,
    rival_locks=1_000,
    held=2_000,
    renewals=3,
    growth=(0, 20_000),
    growth_sql=(0, 20_000),
    growth_rounds=4,
    growth_calls=20,
    growth_results=10,
    growth_batches=2,
)
TINY = Sizes(
    rounds=5,
    many=20,
    many_rounds=1,
    results=3,
    queued=10,
    queue_rounds=1,
    lanes=5,
    lane_calls=10,
    lane_rounds=1,
    server_rounds=2,
    locks=500,
    rival_locks=50,
    held=50,
    renewals=2,
    growth=(0, 500),
    growth_sql=(0, 500),
    growth_rounds=2,
    growth_calls=3,
    growth_results=3,
    growth_batches=1,
    growth_many=5,
    growth_held=5,
)
