"""What a call takes: new ones, duplicates, thousands together, and with RabbitMQ as the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import group

import celery_unique
from benchmarks import contenders
from benchmarks.contenders import (
    OURS,
    OURS_CACHED,
    PLAIN,
    PLAIN_CACHED,
    RIVALS,
    Contender,
    base_of,
)
from benchmarks.measuring import (
    Samples,
    estimate,
    has_all_rounds,
    interleaved,
    median,
    progress,
    ratio_of_rounds,
    summary,
)
from benchmarks.stage import FLOOR, Stage, store_of
from tests.support import RabbitMQServer, ServerNotInstalled

#: A duplicate whose values the holder runs with, too.
MERGED = f"{OURS}: merged"
#: A call that is not published is cheaper than one that is: shown beside the goal, no part of it.
HALF_DUPLICATES = f"{OURS}: apply_many, half duplicates"

#: No further round of many calls begins after this.
LONGEST_S = 120.0


def new(stage: Stage) -> dict[str, Any]:
    """A call whose key is free, and a bare ``SET NX``."""
    samples = interleaved(stage.sizes.rounds, _new_calls(stage, stage.all))
    stage.forget_messages()
    return _compared(samples)


def duplicate(stage: Stage) -> dict[str, Any]:
    """A call whose key is held by a task that waits; with ours also one that is merged into it."""
    acts: dict[str, Callable[[int], Any]] = {FLOOR: stage.floor()}
    for name, one in stage.all.items():
        if name in (PLAIN, PLAIN_CACHED):
            continue
        held = next(stage.numbers)
        one.call(held)
        acts[name] = lambda _, one=one, held=held: one.call_again(held)
    merging, held = _merging(stage.ours), next(stage.numbers)
    merging.delay(held, [0])
    acts[MERGED] = lambda number: merging.delay(held, [number])
    store_of(stage.ours).flush()
    samples = interleaved(stage.sizes.rounds, acts)
    stage.forget_messages()
    figures = _summaries(samples)
    for name, each in figures.items():
        if has_all_rounds(samples, name):
            each["floors"] = ratio_of_rounds(samples[name], samples[FLOOR]).as_json()
    _add_best_rival(figures, samples, lambda medians, name: medians[name], "of_best_rival")
    return figures


def _merging(one: Contender) -> Any:
    options = {"unique_on_conflict": "merge", "unique_merge": "doc_ids"}

    @one.app.task(name="shop.tasks.index", shared=False, unique=True, **options)
    def index(shop_id: int, doc_ids: list[int]) -> None: ...

    return index


def rabbitmq(stage: Stage) -> dict[str, Any]:
    """A new call where RabbitMQ is the broker, and Redis has the locks and the results."""
    try:
        with RabbitMQServer() as broker:
            urls = {name: broker.fresh_url() for name in (PLAIN, OURS)}
            store = stage.redis.url()
            made = {name: contenders.make(name, url, store) for name, url in urls.items()}
            samples = interleaved(stage.sizes.rounds, _new_calls(stage, made))
            for one in made.values():
                one.app.close()
    except ServerNotInstalled as error:
        progress(f"RabbitMQ is left out: {error}")
        stage.missing.append("RabbitMQ")
        return {}
    return _compared(samples)


def many(stage: Stage) -> dict[str, Any]:
    """As many calls together, per call: a loop, a group, and ``apply_many``, which is also
    measured with calls of which half are duplicates."""
    ways: dict[str, Callable[[int], Any]] = {}
    for name in (PLAIN, OURS, PLAIN_CACHED):
        ways[f"{name}: loop"] = lambda _, one=stage.all[name]: [
            signature.apply_async() for signature in _signatures(stage, one)
        ]
    for name in (PLAIN, OURS):
        ways[f"{name}: group"] = lambda _, one=stage.all[name]: group(
            _signatures(stage, one)
        ).apply_async()
    for name in (OURS, OURS_CACHED):
        ways[f"{name}: apply_many"] = lambda _, one=stage.all[name]: celery_unique.apply_many(
            _signatures(stage, one)
        )
    ways[HALF_DUPLICATES] = lambda _: celery_unique.apply_many(_half_duplicates(stage, stage.ours))
    samples: Samples = {name: [] for name in ways}
    ends = time.monotonic() + LONGEST_S
    for number in range(stage.sizes.many_rounds):
        progress(f"{stage.sizes.many:,} calls in {len(ways)} ways, round {number + 1}")
        for name, times in interleaved(1, ways, warm_up=0).items():
            samples[name] += [took / stage.sizes.many for took in times]
        stage.forget_messages()
        if time.monotonic() > ends:
            break  # on a machine that is busy with other things
    figures = _summaries(samples)
    for name, each in figures.items():
        base = _base_of_way(name)
        each["times_plain"] = ratio_of_rounds(samples[name], samples[base]).as_json()
        each["added_us"] = round(median(samples[name]) - median(samples[base]), 2)
    return {"members": stage.sizes.many, "ways": figures}


def _base_of_way(way: str) -> str:
    """The plain calls that are compared with it: a group with a group, all others with a loop."""
    name, _, how = way.partition(": ")
    return f"{base_of(name)}: {'group' if how == 'group' else 'loop'}"


def _new_calls(
    stage: Stage, all_of_them: Mapping[str, Contender]
) -> dict[str, Callable[[int], Any]]:
    acts: dict[str, Callable[[int], Any]] = {FLOOR: stage.floor()}
    for name, one in all_of_them.items():
        acts[name] = lambda _, one=one: one.call(next(stage.numbers))
    return acts


def _signatures(stage: Stage, one: Contender) -> list[Any]:
    numbers = [next(stage.numbers) for _ in range(stage.sizes.many)]
    return [one.task.s(number, True, tag="nightly") for number in numbers]


def _half_duplicates(stage: Stage, one: Contender) -> list[Any]:
    """Each call twice, the second half of them after the first."""
    numbers = [next(stage.numbers) for _ in range(stage.sizes.many // 2)]
    return [one.task.s(number, True, tag="nightly") for number in [*numbers, *numbers]]


def _summaries(samples: Samples) -> dict[str, Any]:
    return {name: summary(times) for name, times in samples.items()}


def _compared(samples: Samples) -> dict[str, Any]:
    """The figures of new calls, with what each takes of plain Celery's time and in addition."""

    def added(medians: Mapping[str, float], name: str) -> float:
        return medians[name] - medians[base_of(name)]

    figures = _summaries(samples)
    for name, each in figures.items():
        if name == FLOOR or not has_all_rounds(samples, name):
            continue
        each["times_plain"] = ratio_of_rounds(samples[name], samples[base_of(name)]).as_json()
        if name == base_of(name):
            continue
        each["added_us"] = round(median(samples[name]) - median(samples[base_of(name)]), 2)
        each["added_floors"] = estimate(
            samples, lambda medians, name=name: added(medians, name) / medians[FLOOR]
        ).as_json()
    _add_best_rival(figures, samples, added, "added_of_best_rival")
    return figures


def _add_best_rival(
    figures: dict[str, Any],
    samples: Samples,
    of: Callable[[Mapping[str, float], str], float],
    field: str,
) -> None:
    """What ours takes of that of the best rival, if any is installed."""
    rivals = [name for name in RIVALS if has_all_rounds(samples, name)]
    if rivals:
        figures[OURS][field] = estimate(
            samples,
            lambda medians: of(medians, OURS) / min(of(medians, name) for name in rivals),
        ).as_json()
