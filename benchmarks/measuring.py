"""Rounds in which all contenders take turns, and what is told of their times."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Samples in microseconds, by contender.
Samples = dict[str, list[float]]
Act = Callable[[int], Any]

#: A contender whose first call takes longer than this is asked only a few times more.
SLOW_US = 100_000.0
SLOW_ROUNDS = 4
RESAMPLED = 1000


def progress(text: str) -> None:
    print(f"  .. {text}", file=sys.stderr, flush=True)


def interleaved(
    rounds: int,
    acts: Mapping[str, Act],
    *,
    warm_up: int = 3,
    between: Callable[[], Any] = lambda: None,
) -> Samples:
    """The times of each act, one of each in every round, in a new order each time.

    An act is given a number that it has not had before. What it returns is let go of after
    the clock was read, and ``between`` is called before the next one.
    """
    samples: Samples = {name: [] for name in acts}
    order = list(acts)
    shuffle = random.Random(7).shuffle
    for number in range(-warm_up, rounds):
        shuffle(order)
        for name in order:
            slow = samples[name] and samples[name][0] > SLOW_US
            if slow and len(samples[name]) >= SLOW_ROUNDS:
                continue
            took = timed(acts[name], number)
            between()
            if number >= 0 or took > SLOW_US:
                samples[name].append(took)
    return samples


def timed(act: Act, number: int) -> float:
    began = time.perf_counter()
    kept = act(number)
    took = (time.perf_counter() - began) * 1e6
    del kept
    return took


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(values: Sequence[float]) -> dict[str, float]:
    """What the JSON says of one contender, in microseconds."""
    return {
        "median_us": round(median(values), 2),
        "p10_us": round(quantile(values, 0.10), 2),
        "p90_us": round(quantile(values, 0.90), 2),
        "samples": len(values),
    }


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with the interval in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {
            "ratio": round(self.value, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
        }


def ratio_of_rounds(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The median of the ratios of rounds that were made side by side, by bootstrap."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    chance = random.Random(7)
    again = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return Ratio(median(ratios), again[int(RESAMPLED * 0.025)], again[int(RESAMPLED * 0.975)])
