"""The history of `make soak`, and what the page on the evidence says of it.

``python -m tests.chaos.evidence`` writes the tables of docs/explanation/evidence.md again.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "explanation" / "evidence.md"
HISTORY = PAGE.with_suffix(".json")
MARKED = re.compile(r"(?s)(<!-- soak -->\n).*?(\n<!-- end of soak -->)")

#: How many calls the figures are to rest on: without faults, and under each fault.
WANTED_WITHOUT, WANTED_UNDER = 1_000_000, 20_000
NONE = "none"
NO_RUNS = "No run has been recorded yet."


@dataclass(frozen=True)
class Soaked:
    """One run. Calls are those that were accepted; ``lost`` and ``duplicated`` are violations, and
    ``excused_*`` what a fault explains."""

    date: str
    commit: str
    machine: str
    broker: str
    store: str
    fault: str
    seed: int
    seconds: int
    calls: int
    runs: int
    lost: int
    duplicated: int
    other: int  # leases that lapsed, and what was left over
    excused_lost: int
    excused_duplicated: int

    @property
    def setup(self) -> str:
        """As the tables name it."""
        if self.broker == "one redis":
            return f"{self.store} (also the broker)"
        return self.store if self.broker == "redis" else f"{self.store} ({self.broker})"

    @property
    def passed(self) -> bool:
        return not (self.lost or self.duplicated or self.other)


def read_history(path: Path = HISTORY) -> list[Soaked]:
    if not path.exists():
        return []
    return [Soaked(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def write_history(history: Iterable[Soaked], path: Path = HISTORY) -> None:
    lines = ",\n".join(json.dumps(asdict(each)) for each in history)
    path.write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def upper_bound(events: int, confidence: float = 0.95) -> float:
    """The largest mean of a Poisson distribution that shows so few events with a probability of at
    least 5 %: 3.0 for none, which is the rule of three."""

    def seen(mean: float) -> float:
        return sum(
            math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(events + 1)
        )

    low, high = 1e-9, 10.0 + 3 * events
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if seen(middle) > 1 - confidence else (low, middle)
    return high


def tables(history: Iterable[Soaked]) -> str:
    history = list(history)
    if not history:
        return NO_RUNS
    return "\n\n".join(
        [
            "Lost and duplicated calls per million, by fault, over all stores:",
            _rates(history, lambda each: (each.fault,), ["fault"]),
            "By fault and store:",
            _rates(history, lambda each: (each.fault, each.setup), ["fault", "store"]),
            "The runs, by day, commit and machine:",
            _runs(history),
        ]
    )


def _rates(
    history: list[Soaked], group: Callable[[Soaked], tuple[str, ...]], names: list[str]
) -> str:
    groups: dict[tuple[str, ...], list[Soaked]] = defaultdict(list)
    for each in history:
        groups[group(each)].append(each)
    head = [*names, "calls", "lost", "at most", "duplicated", "at most"]
    head += ["lost, explained", "duplicated, explained"]
    rows = []
    for group_name in sorted(groups, key=lambda name: (name[0] != NONE, name)):
        runs = groups[group_name]
        calls = sum(each.calls for each in runs)
        row = [*group_name, f"{calls:,}"]
        for what in ("lost", "duplicated"):
            events = sum(getattr(each, what) for each in runs)
            row += [_per_million(events, calls), _per_million(upper_bound(events), calls)]
        for what in ("excused_lost", "excused_duplicated"):
            row.append(_per_million(sum(getattr(each, what) for each in runs), calls))
        rows.append(row)
    return _table(head, rows, left=len(names))


def _per_million(events: float, calls: int) -> str:
    if not events:
        return "0"
    rate = events / calls * 1e6 if calls else float("inf")
    digits = max(0, 1 - math.floor(math.log10(rate))) if rate < float("inf") else 0
    return f"{rate:,.{digits}f}"


def _runs(history: list[Soaked]) -> str:
    groups: dict[tuple[str, str, str], list[Soaked]] = defaultdict(list)
    for each in history:
        groups[each.date[:10], each.commit, each.machine].append(each)
    rows = []
    for (day, commit, machine), runs in groups.items():
        with_faults = sum(each.calls for each in runs if each.fault != NONE)
        without = sum(each.calls for each in runs if each.fault == NONE)
        minutes = sum(each.seconds for each in runs) / 60
        failed = sum(not each.passed for each in runs)
        rows.append(
            [
                *(day, f"`{commit}`", machine, f"{len(runs)}", f"{minutes:.0f}"),
                *(f"{without:,}", f"{with_faults:,}", f"{failed}"),
            ]
        )
    head = ["day", "commit", "machine", "runs", "minutes", "calls without faults"]
    return _table([*head, "calls under faults", "runs with a violation"], rows, left=3)


def _table(head: list[str], rows: list[list[str]], *, left: int) -> str:
    line = [*["---"] * left, *["---:"] * (len(head) - left)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, line, *rows])


def filled(page: str, history: Iterable[Soaked]) -> str:
    text = tables(history)
    return MARKED.sub(lambda found: f"{found[1]}{text}{found[2]}", page)


def write_page() -> None:
    page = filled(PAGE.read_text(encoding="utf-8"), read_history())
    PAGE.write_text(page, encoding="utf-8")


def main() -> int:
    write_page()
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
