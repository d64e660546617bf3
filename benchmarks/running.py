"""What a task takes with a real worker: from the call to its result, and tasks a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import redis

from benchmarks.contenders import OURS, RIVALS, Contender, base_of
from benchmarks.measuring import (
    Samples,
    estimate,
    has_all_rounds,
    interleaved,
    median,
    progress,
    ratio_of_rounds,
    shuffled,
    summary,
)
from benchmarks.servers import Workers, wait_for, workers
from benchmarks.stage import Stage, held_queue

#: Processes in the pool of a worker.
CONCURRENCIES = (1, 4)
#: Kind of task -> whether its result is ignored.
RESULTS = {"with results": False, "results ignored": True}
#: How long one contender may work on one queue, and how few tasks a second are not measured twice.
LONGEST_S = 3.0
SLOW_PER_S = 20.0
READY_S = 180.0
#: The system counts processor time in these.
CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def run(stage: Stage) -> dict[str, Any]:
    return {str(concurrency): _with_pool_of(stage, concurrency) for concurrency in CONCURRENCIES}


def _with_pool_of(stage: Stage, concurrency: int) -> dict[str, Any]:
    stage.forget_messages()
    # Apps of their own: Celery keeps a subscription for every result of the parts before.
    stage = replace(stage, all=stage.made_anew())
    with workers(list(stage.all), stage.redis.url(), concurrency=concurrency) as running:
        for one in stage.all.values():
            until_ready(stage, one, running)
        figures: dict[str, Any] = {"call_to_result": _call_to_result(stage)}
        rates = _throughput(stage, running, concurrency)
    stage.forget_messages()
    for one in stage.all.values():
        one.app.close()
    return {**figures, **rates}


def until_ready(stage: Stage, one: Contender, running: Workers) -> None:
    progress(f"a worker with {one.name}")
    try:
        one.call(next(stage.numbers)).get(timeout=READY_S)
    except Exception as error:
        raise RuntimeError(f"{one.name}: no result ({error!r})\n{running.log_tail()}") from error


def _call_to_result(stage: Stage) -> dict[str, Any]:
    progress("from a call to its result")
    acts: dict[str, Callable[[int], Any]] = {}
    for name, one in stage.all.items():
        acts[name] = lambda _, one=one: one.call(next(stage.numbers)).get(timeout=READY_S)
    samples = interleaved(stage.sizes.results, acts)
    figures: dict[str, Any] = {name: summary(times) for name, times in samples.items()}
    whole = {name: times for name, times in samples.items() if has_all_rounds(samples, name)}
    for name, times in whole.items():
        figures[name]["times_plain"] = ratio_of_rounds(times, whole[base_of(name)]).as_json()
    rivals = [name for name in RIVALS if name in whole]
    if rivals:
        figures[OURS]["of_best_rival"] = estimate(
            whole, lambda medians: medians[OURS] / min(medians[name] for name in rivals)
        ).as_json()
    return figures


def _throughput(stage: Stage, running: Workers, concurrency: int) -> dict[str, Any]:
    """Each contender works on a queue of each kind of task in every round."""
    rates: dict[str, Samples] = {kind: {name: [] for name in stage.all} for kind in RESULTS}
    processor: dict[str, Samples] = {kind: {name: [] for name in stage.all} for kind in RESULTS}
    for number, order in enumerate(shuffled(stage.sizes.queue_rounds, list(stage.all)), 1):
        progress(f"tasks a second, {concurrency} in the pool, round {number}")
        for name in order:
            for kind, ignore_result in RESULTS.items():
                found = rates[kind][name]
                if found and found[0] < SLOW_PER_S:
                    continue
                used = running.processor_s(name)
                rate, tasks = _rate(stage, stage.all[name], ignore_result)
                found.append(rate)
                used = running.processor_s(name) - used
                processor[kind][name].append(max(used, CLOCK_TICK_S) * 1e6 / max(1, tasks))
    return {kind: _rates(rates[kind], processor[kind]) for kind in RESULTS}


def _rates(rates: Samples, processor: Samples) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, found in rates.items():
        figures[name] = {
            "median_per_s": round(median(found), 1),
            "lowest_per_s": round(min(found), 1),
            "highest_per_s": round(max(found), 1),
            "processor_us": round(median(processor[name]), 1),
            "samples": len(found),
        }
        plain = base_of(name)
        if len(found) == len(rates[plain]):
            figures[name]["times_plain"] = ratio_of_rounds(found, rates[plain]).as_json()
            each = ratio_of_rounds(processor[name], processor[plain])
            figures[name]["processor_times_plain"] = each.as_json()
    return figures


def _rate(stage: Stage, one: Contender, ignore_result: bool) -> tuple[float, int]:
    """Tasks a second of a queue that is complete before the worker receives its first message,
    and how many they were."""
    client = redis.Redis.from_url(stage.redis.url(one.database))
    hold, live = held_queue(one), one.app.conf.task_default_queue
    count = stage.sizes.queued
    for _ in range(count):
        one.call(next(stage.numbers), queue=hold, ignore_result=ignore_result)

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
    return rate, count - remaining
