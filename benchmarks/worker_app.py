"""The app of a worker process of the benchmark: one contender's, named in its environment."""

from __future__ import annotations

import os

from benchmarks import contenders

_environment = os.environ
app = contenders.make(
    _environment["BENCH_CONTENDER"], _environment["BENCH_BROKER"], _environment["BENCH_STORE"]
).app
