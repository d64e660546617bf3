"""What a call takes: new ones, duplicates, and thousands together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import group

import celery_unique
from benchmarks.contenders import OURS, PLAIN, Contender
from benchmarks.measuring import Samples, interleaved, median, progress, summary
from benchmarks.stage import FLOOR, Stage, store_of

#: A call that is not published is cheaper than one that is: told beside the goal, no part of it.
HALF_DUPLICATES = f"{OURS}: apply_many, half duplicates"

#: No further round of many calls is begun after this.
LONGEST_S = 120.0


def new(stage: Stage) -> dict[str, Any]:
    """A call whose key is free, and a bare ``SET NX``."""
    acts: dict[str, Callable[[int], Any]] = {FLOOR: stage.floor()}
    for name, one in stage.all.items():
        acts[name] = lambda _, one=one: one.call(next(stage.numbers))
    samples = interleaved(stage.sizes.rounds, acts)
    stage.forget_messages()
    return _with_added(samples)


def duplicate(stage: Stage) -> dict[str, Any]:
    """A call whose key is held by a task that waits."""
    acts: dict[str, Callable[[int], Any]] = {FLOOR: stage.floor()}
    for name, one in stage.all.items():
        if name == PLAIN:
            continue
        held = next(stage.numbers)
        one.call(held)
        acts[name] = lambda _, one=one, held=held: one.call_again(held)
    store_of(stage.ours).flush()
    samples = interleaved(stage.sizes.rounds, acts)
    stage.forget_messages()
    return _told(samples)


def many(stage: Stage) -> dict[str, Any]:
    """As many calls together, told per call: a loop, a group, and ``apply_many``, which is
    also given calls of which half are duplicates."""
    ways: dict[str, Callable[[int], Any]] = {}
    for name in (PLAIN, OURS):
        one = stage.all[name]
        ways[f"{name}: loop"] = lambda _, one=one: [
            signature.apply_async() for signature in _signatures(stage, one)
        ]
        ways[f"{name}: group"] = lambda _, one=one: group(_signatures(stage, one)).apply_async()
    apply_many = getattr(celery_unique, "apply_many", None)
    if apply_many is None:
        progress("this version has no celery_unique.apply_many: it is left out")
    else:
        ways[f"{OURS}: apply_many"] = lambda _: apply_many(_signatures(stage, stage.ours))
        ways[HALF_DUPLICATES] = lambda _: apply_many(_half_duplicates(stage, stage.ours))
    samples: Samples = {name: [] for name in ways}
    ends = time.monotonic() + LONGEST_S
    for number in range(stage.sizes.many_rounds):
        progress(f"{stage.sizes.many:,} calls in {len(ways)} ways, round {number + 1}")
        for name, times in interleaved(1, ways, warm_up=0).items():
            samples[name] += [took / stage.sizes.many for took in times]
        stage.forget_messages()
        if time.monotonic() > ends:
            break  # on a machine that is busy with other things
    told = _told(samples)
    for name, figures in told.items():
        plain = samples[f"{PLAIN}: group" if name.endswith("group") else f"{PLAIN}: loop"]
        figures["added_us"] = round(median(samples[name]) - median(plain), 2)
    return {"members": stage.sizes.many, "has_apply_many": apply_many is not None, "ways": told}


def _signatures(stage: Stage, one: Contender) -> list[Any]:
    numbers = [next(stage.numbers) for _ in range(stage.sizes.many)]
    return [one.task.s(number, True, tag="nightly") for number in numbers]


def _half_duplicates(stage: Stage, one: Contender) -> list[Any]:
    """Each call twice, the second half of them after the first."""
    numbers = [next(stage.numbers) for _ in range(stage.sizes.many // 2)]
    return [one.task.s(number, True, tag="nightly") for number in [*numbers, *numbers]]


def _told(samples: Samples) -> dict[str, Any]:
    return {name: summary(times) for name, times in samples.items()}


def _with_added(samples: Mapping[str, list[float]]) -> dict[str, Any]:
    told = _told(dict(samples))
    plain = median(samples[PLAIN])
    for name, figures in told.items():
        if name not in (PLAIN, FLOOR):
            figures["added_us"] = round(median(samples[name]) - plain, 2)
    return told
