"""What a task takes with a real worker: from the call to its result, and tasks a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import redis

from benchmarks.contenders import PLAIN, Contender
from benchmarks.measuring import interleaved, median, progress, summary
from benchmarks.servers import Workers, wait_for, workers
from benchmarks.stage import Stage

#: How long one contender may work on one queue.
LONGEST_S = 15.0
READY_S = 180.0


def run(stage: Stage) -> dict[str, Any]:
    stage.forget_messages()
    # Apps of their own: Celery keeps a subscription for every result of the parts before.
    stage = replace(stage, all=stage.made_anew())
    with workers(list(stage.all), stage.broker.url(), stage.locks.url()) as running:
        for one in stage.all.values():
            until_ready(stage, one, running)
        told = {"call_to_result": _call_to_result(stage)}
        progress("tasks a second")
        told["throughput"] = _throughput(stage)
    stage.forget_messages()
    return told


def until_ready(stage: Stage, one: Contender, running: Workers) -> None:
    progress(f"a worker with {one.name}")
    try:
        one.call(next(stage.numbers)).get(timeout=READY_S)
    except Exception as error:
        raise RuntimeError(f"{one.name}: no result ({error!r})\n{running.said()}") from error


def _call_to_result(stage: Stage) -> dict[str, Any]:
    acts: dict[str, Callable[[int], Any]] = {}
    for name, one in stage.all.items():
        acts[name] = lambda _, one=one: one.call(next(stage.numbers)).get(timeout=READY_S)
    samples = interleaved(stage.sizes.results, acts)
    told: dict[str, Any] = {name: summary(times) for name, times in samples.items()}
    for name, times in samples.items():
        told[name]["times_plain"] = round(median(times) / median(samples[PLAIN]), 3)
    return told


def _throughput(stage: Stage) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in stage.all}
    for _ in range(stage.sizes.queue_rounds):
        for name, one in stage.all.items():
            rates[name].append(_rate(stage, one))
    return {
        name: {"median_per_s": round(median(found), 1), "samples": len(found)}
        for name, found in rates.items()
    }


def _rate(stage: Stage, one: Contender) -> float:
    """Tasks a second of a queue that is complete before the worker sees its first message."""
    client = redis.Redis.from_url(stage.broker.url(one.broker_db))
    hold, live = f"hold-{one.broker_db}", one.app.conf.task_default_queue
    count = stage.sizes.queued
    for _ in range(count):
        one.task.apply_async((next(stage.numbers), True), queue=hold, ignore_result=True)

    def left() -> int:
        return int(client.llen(live)) + int(client.hlen("unacked"))

    began = time.perf_counter()
    client.rename(hold, live)
    while (remaining := left()) and time.perf_counter() - began < LONGEST_S:
        time.sleep(0.002)
    rate = (count - remaining) / (time.perf_counter() - began)
    client.delete(live)
    wait_for(lambda: left() == 0, f"the end of the tasks of {one.name}", READY_S)
    client.close()
    return rate
