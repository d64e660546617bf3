"""What waiting in lanes costs: tasks a second of a body that sleeps, one at a time for each key."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import redis

from benchmarks.contenders import LANE_TASK, OURS, PLAIN, RUNS, Contender
from benchmarks.measuring import median, progress, ratio_of_rounds, shuffled
from benchmarks.running import READY_S, until_ready
from benchmarks.servers import wait_for, workers
from benchmarks.stage import Stage

#: Processes in the pool of a worker.
CONCURRENCY = 8
#: How long the body takes.
BODY_S = 0.05
NAMES = (PLAIN, OURS)


def run(stage: Stage) -> dict[str, Any]:
    """Each contender gets the same calls in every round: plain Celery runs all of them side by
    side, the lanes one at a time for each key."""
    stage.forget_messages()
    fresh = stage.made_anew()
    stage = replace(stage, all={name: fresh[name] for name in NAMES})
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    parked: list[int] = []
    with workers(NAMES, stage.redis.url(), concurrency=CONCURRENCY) as running:
        for one in stage.all.values():
            until_ready(stage, one, running)
        for number, order in enumerate(shuffled(stage.sizes.lane_rounds, NAMES), 1):
            progress(f"lanes, round {number}")
            for name in order:
                rate, waited = _rate(stage, stage.all[name])
                rates[name].append(rate)
                if name == OURS:
                    parked.append(waited)
    stage.forget_messages()
    for one in fresh.values():
        one.app.close()
    return {
        "keys": stage.sizes.lanes,
        "calls": stage.sizes.lane_calls,
        "parked": round(median(parked)),
        PLAIN: {"median_per_s": round(median(rates[PLAIN]), 1)},
        OURS: {
            "median_per_s": round(median(rates[OURS]), 1),
            "times_plain": ratio_of_rounds(rates[OURS], rates[PLAIN]).as_json(),
        },
    }


def _rate(stage: Stage, one: Contender) -> tuple[float, int]:
    """Tasks a second from the first call to the last end, and how many calls were parked."""
    calls, task = stage.sizes.lane_calls, one.app.tasks[LANE_TASK]
    waited = 0
    with redis.Redis.from_url(stage.redis.url(one.database)) as client:
        client.delete(RUNS)
        began = time.perf_counter()
        for number in range(calls):
            result = task.apply_async((number % stage.sizes.lanes, number, BODY_S))
            waited += getattr(result, "outcome", "") == "queued"
        wait_for(
            lambda: int(client.get(RUNS) or 0) >= calls, f"the tasks of {one.name}", READY_S, 0.005
        )
        return calls / (time.perf_counter() - began), waited
