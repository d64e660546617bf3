"""What the figures have to show, checked on the run itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import OURS, RIVALS
from benchmarks.databases import DATABASES
from benchmarks.growth import KINDS
from benchmarks.sizes import FULL
from benchmarks.stage import FLOOR

Results = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """``measured`` None: the run has not measured it."""

    text: str
    limit: float
    measured: float | None
    unit: str = "x"

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "pass" if self.measured <= self.limit else "miss"

    def as_json(self) -> dict[str, Any]:
        measured = None if self.measured is None else round(self.measured, 3)
        return {
            "goal": self.text,
            "limit": self.limit,
            "measured": measured,
            "unit": self.unit,
            "verdict": self.verdict,
        }


def goals(results: Results) -> list[Goal]:
    return [
        *_new_call(results),
        *_duplicate(results),
        *_together(results),
        *_with_worker(results),
        *_growth(results),
        *_growth_sql(results),
        *_keys(results),
        *_bytes(results),
    ]


def _asked(results: Results, find: Callable[[Results], float | None]) -> float | None:
    """What was measured, None where that part of the run was left out."""
    try:
        return find(results)
    except (KeyError, ZeroDivisionError):
        return None


def _best_rival(figures: dict[str, Any], field: str) -> float:
    there = [figures[name][field] for name in RIVALS if name in figures]
    if not there:
        raise KeyError("rivals")
    return float(min(there))


def _new_call(results: Results) -> Iterator[Goal]:
    def times_floor(all_: Results) -> float:
        new = all_["new"]
        return float(new[OURS]["added_us"] / new[FLOOR]["median_us"])

    def of_rival(all_: Results) -> float:
        new = all_["new"]
        return float(new[OURS]["added_us"] / _best_rival(new, "added_us"))

    yield Goal("a new call adds, in floors", 2.0, _asked(results, times_floor))
    yield Goal("a new call adds, of what the best rival adds", 0.5, _asked(results, of_rival))


def _duplicate(results: Results) -> Iterator[Goal]:
    def times_floor(all_: Results) -> float:
        again = all_["duplicate"]
        return float(again[OURS]["median_us"] / again[FLOOR]["median_us"])

    def of_rival(all_: Results) -> float:
        again = all_["duplicate"]
        return float(again[OURS]["median_us"] / _best_rival(again, "median_us"))

    yield Goal("a duplicate takes, in floors", 2.5, _asked(results, times_floor))
    yield Goal("a duplicate takes, of the best rival's", 0.5, _asked(results, of_rival))


def _together(results: Results) -> Iterator[Goal]:
    def of_single(all_: Results) -> float:
        added = all_["many"]["ways"][f"{OURS}: apply_many"]["added_us"]
        return float(added / all_["new"][OURS]["added_us"])

    yield Goal(
        "a call in apply_many adds, of what a single one adds", 1 / 3, _asked(results, of_single)
    )


def _with_worker(results: Results) -> Iterator[Goal]:
    def times_plain(all_: Results) -> float:
        return float(all_["worker"]["call_to_result"][OURS]["times_plain"])

    yield Goal("from a call to its result, of plain Celery's", 1.25, _asked(results, times_plain))


def _growth(results: Results) -> Iterator[Goal]:
    def highest(kind: str) -> Callable[[Results], float]:
        return lambda all_: float(all_["growth"]["figures"][kind][str(locks)]["high"])

    locks = max(results.get("growth", {}).get("locks", FULL.growth))
    for kind in KINDS:
        text = f"{kind} at {locks:,} locks against none, upper end of 95 %"
        yield Goal(text, 1.25, _asked(results, highest(kind)))


def _growth_sql(results: Results) -> Iterator[Goal]:
    def highest(name: str) -> Callable[[Results], float]:
        def of_every_figure(all_: Results) -> float:
            figures = all_["growth_sql"]["stores"][name]["figures"]
            return float(max(sizes[max(sizes, key=int)]["high"] for sizes in figures.values()))

        return of_every_figure

    locks = max(results.get("growth_sql", {}).get("locks", FULL.growth_sql))
    for name in DATABASES:
        text = f"{name}: every act at {locks:,} locks against none, highest upper end of 95 %"
        yield Goal(text, 1.5, _asked(results, highest(name)))


def _keys(results: Results) -> Iterator[Goal]:
    def of(case: str) -> Callable[[Results], float]:
        return lambda all_: float(all_["key"][case]["key"]["median_us"])

    small, typical = "three small arguments", "typical, nested, 200 bytes"
    yield Goal(f"key of {small}", 15.0, _asked(results, of(small)), "us")
    yield Goal(f"key of arguments: {typical}", 60.0, _asked(results, of(typical)), "us")


def _bytes(results: Results) -> Iterator[Goal]:
    def waiting(all_: Results) -> float:
        return float(all_["memory"]["times_bare"]["waiting"])

    yield Goal("bytes of a lock, of a bare SET's", 1.6, _asked(results, waiting))
