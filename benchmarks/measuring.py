"""Rounds in which all contenders take turns, and the figures computed from their times."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: One figure of each round by contender, mostly microseconds.
Samples = dict[str, list[float]]
Act = Callable[[int], Any]
#: Computes a figure of a whole run from the medians of its contenders.
Statistic = Callable[[Mapping[str, float]], float]

#: A contender of which no call takes less than this makes only a few. The first one also connects.
SLOW_US = 100_000.0
SLOW_ROUNDS = 2
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

    The argument of an act is a number that it has not had before. Its return value is deleted
    after the clock was read, and ``between`` is called before the next one.
    """
    samples: Samples = {name: [] for name in acts}
    fastest = dict.fromkeys(acts, float("inf"))
    for number, order in enumerate(shuffled(rounds + warm_up, list(acts)), -warm_up):
        for name in order:
            if fastest[name] > SLOW_US and len(samples[name]) >= SLOW_ROUNDS:
                continue
            took = timed(acts[name], number)
            between()
            fastest[name] = min(fastest[name], took)
            if number >= 0:
                samples[name].append(took)
    return samples


def shuffled(rounds: int, names: Sequence[str]) -> list[list[str]]:
    """The order of each round."""
    chance = random.Random(7)
    return [chance.sample(names, len(names)) for _ in range(rounds)]


def timed(act: Act, number: int) -> float:
    began = time.perf_counter()
    kept = act(number)
    took = (time.perf_counter() - began) * 1e6
    del kept
    return took


def has_all_rounds(samples: Mapping[str, Sequence[float]], name: str) -> bool:
    """Whether it was not so slow that it was left out of some rounds."""
    return len(samples.get(name, ())) == max(map(len, samples.values()))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(values: Sequence[float]) -> dict[str, float]:
    """The figures of one contender in the JSON, in microseconds."""
    return {
        "median_us": round(median(values), 2),
        "p10_us": round(quantile(values, 0.10), 2),
        "p90_us": round(quantile(values, 0.90), 2),
        "samples": len(values),
    }


@dataclass(frozen=True)
class Ratio:
    """A figure with the interval in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {
            "ratio": round(self.value, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
        }


def estimate(samples: Mapping[str, Sequence[float]], statistic: Statistic) -> Ratio:
    """A statistic of the medians, and its interval by a bootstrap over the rounds.

    A round is drawn with the samples of all contenders, so that what affected all of them in
    that round cancels out. Contenders with fewer rounds than the others are not in it.
    """
    rounds = max(map(len, samples.values()))
    whole = {name: values for name, values in samples.items() if has_all_rounds(samples, name)}
    chance = random.Random(7)
    again = []
    for _ in range(RESAMPLED):
        drawn = chance.choices(range(rounds), k=rounds)
        again.append(
            statistic({name: median([values[n] for n in drawn]) for name, values in whole.items()})
        )
    again.sort()
    value = statistic({name: median(values) for name, values in whole.items()})
    return Ratio(value, again[int(RESAMPLED * 0.025)], again[int(RESAMPLED * 0.975)])


def ratio_of_rounds(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The median of the ratios of rounds that were made side by side, by bootstrap."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    chance = random.Random(7)
    again = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return Ratio(median(ratios), again[int(RESAMPLED * 0.025)], again[int(RESAMPLED * 0.975)])
