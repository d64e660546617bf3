"""What the figures have to show, checked on the run itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.calls import MERGED
from benchmarks.contenders import OURS
from benchmarks.databases import DATABASES
from benchmarks.growth import KINDS
from benchmarks.running import RESULTS
from benchmarks.server_cost import LIFE, NEW, beyond_plain
from benchmarks.sizes import FULL

Results = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """``measured`` None: the run has not measured it."""

    text: str
    limit: float
    measured: float | None
    unit: str = "x"
    #: The ends of the interval of 95 %, where the figure has one.
    interval: tuple[float, float] | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        reached = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "pass" if reached else "miss"

    def as_json(self) -> dict[str, Any]:
        measured = None if self.measured is None else round(self.measured, 3)
        return {
            "goal": self.text,
            "limit": self.limit,
            "at_least": self.at_least,
            "measured": measured,
            "interval": self.interval,
            "unit": self.unit,
            "verdict": self.verdict,
        }


def goals(results: Results) -> list[Goal]:
    return [
        *_calls(results),
        *_with_worker(results),
        *_lanes(results),
        *_server(results),
        *_growth(results),
        *_growth_sql(results),
        *_keys(results),
        *_bytes(results),
    ]


def _measured(results: Results, find: Callable[[Results], float | None]) -> float | None:
    """The figure, None where that part of the run was left out."""
    try:
        return find(results)
    except (KeyError, ZeroDivisionError):
        return None


def _ratio(text: str, limit: float, results: Results, *path: str, at_least: bool = False) -> Goal:
    """A goal of a figure that has an interval, found under these keys."""
    found: Any = results
    for key in path:
        found = found.get(key)
        if found is None:
            return Goal(text, limit, None, at_least=at_least)
    interval = (found["low"], found["high"])
    return Goal(text, limit, found["ratio"], interval=interval, at_least=at_least)


def _calls(results: Results) -> Iterator[Goal]:
    new, again, many = ("new", OURS), ("duplicate", OURS), ("many", "ways", f"{OURS}: apply_many")
    yield _ratio("a new call, of plain Celery's", 1.10, results, *new, "times_plain")
    text = "a new call adds, of what the best rival adds"
    yield _ratio(text, 0.5, results, *new, "added_of_best_rival")
    text = "a new call with RabbitMQ as the broker adds, in floors"
    yield _ratio(text, 1.5, results, "rabbitmq", OURS, "added_floors")
    yield _ratio("a duplicate takes, in floors", 1.7, results, *again, "floors")
    yield _ratio("a merged call takes, in floors", 2.5, results, "duplicate", MERGED, "floors")
    text = "a duplicate takes, of the best rival's"
    yield _ratio(text, 0.7, results, *again, "of_best_rival")
    text = "a call in apply_many, of one in a loop of plain Celery's"
    yield _ratio(text, 0.8, results, *many, "times_plain")


def _with_worker(results: Results) -> Iterator[Goal]:
    for concurrency, least in ((1, 0.90), (4, 0.95)):
        part, pool = ("worker", str(concurrency)), f"{concurrency} in the pool"
        path = (*part, "call_to_result", OURS)
        text = f"call to result, {pool}, of plain Celery's"
        yield _ratio(text, 1.05, results, *path, "times_plain")
        text = f"call to result, {pool}, of the best rival's"
        yield _ratio(text, 1.0, results, *path, "of_best_rival")
        for kind in RESULTS:
            text = f"tasks a second, {pool}, {kind}, of plain Celery's"
            path = (*part, kind, OURS)
            yield _ratio(text, least, results, *path, "times_plain", at_least=True)


def _lanes(results: Results) -> Iterator[Goal]:
    if "lanes" in results:
        text = "tasks a second in lanes, one at a time for each key, of plain Celery's"
        yield _ratio(text, 0.90, results, "lanes", OURS, "times_plain", at_least=True)


def _server(results: Results) -> Iterator[Goal]:
    for act, limit in ((NEW, 10.0), (LIFE, 30.0)):
        yield _ratio(
            f"scripts of a {act} on the Redis server, of a SET NX",
            *(limit, results, "server", f"{act}, {OURS}", "times_set_nx"),
        )

    def commands(all_: Results) -> float:
        return beyond_plain(all_["server"], LIFE, "commands")

    text = "commands of a whole life beyond plain Celery's"
    yield Goal(text, 3.0, _measured(results, commands), "")


def _growth(results: Results) -> Iterator[Goal]:
    def highest(kind: str) -> Callable[[Results], float]:
        return lambda all_: float(all_["growth"]["figures"][kind][str(locks)]["high"])

    locks = max(results.get("growth", {}).get("locks", FULL.growth))
    for kind in KINDS:
        text = f"{kind} at {locks:,} locks against none, upper end of 95 %"
        yield Goal(text, 1.25, _measured(results, highest(kind)))


def _growth_sql(results: Results) -> Iterator[Goal]:
    def highest(name: str) -> Callable[[Results], float]:
        def of_every_figure(all_: Results) -> float:
            figures = all_["growth_sql"]["stores"][name]["figures"]
            return float(max(sizes[max(sizes, key=int)]["high"] for sizes in figures.values()))

        return of_every_figure

    locks = max(results.get("growth_sql", {}).get("locks", FULL.growth_sql))
    for name in DATABASES:
        text = f"{name}: every act at {locks:,} locks against none, highest upper end of 95 %"
        yield Goal(text, 1.5, _measured(results, highest(name)))


def _keys(results: Results) -> Iterator[Goal]:
    def of(case: str) -> Callable[[Results], float]:
        return lambda all_: float(all_["key"][case]["key"]["median_us"])

    small, typical = "three small arguments", "typical, nested, 200 bytes"
    yield Goal(f"key of {small}", 15.0, _measured(results, of(small)), "us")
    yield Goal(f"key of arguments: {typical}", 60.0, _measured(results, of(typical)), "us")


def _bytes(results: Results) -> Iterator[Goal]:
    def waiting(all_: Results) -> float:
        return float(all_["memory"]["times_bare"]["waiting"])

    yield Goal("bytes of a lock, of a bare SET's", 1.6, _measured(results, waiting))
