"""Simulate many seeds, each twice, and print what was covered and what was violated.

python -m spec.simulation.run --seeds 10000           two processes; exit 1 on a violation
python -m spec.simulation.run --seed 7                one seed, with its trace
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_unique.stores.memory import MemoryStore

from .checker import violation
from .environment import patched
from .plan import FAULTS, OPERATOR, plan_of
from .scheduler import Key
from .shrink import Shrunk, shrink, story
from .simulation import Trace, simulate

#: Seeds that one process is given at a time.
BATCH = 25


@dataclass(slots=True)
class Found:
    """Of some seeds."""

    seeds: int = 0
    points: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    schedules: set[bytes] = field(default_factory=set)
    #: Seed: what was violated.
    violations: dict[int, str] = field(default_factory=dict)
    #: Seeds whose two runs differ.
    differing: list[int] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.seeds += other.seeds
        self.points += other.points
        self.events += other.events
        self.faults += other.faults
        self.acts += other.acts
        self.schedules |= other.schedules
        self.violations.update(other.violations)
        self.differing += other.differing


def explore(seeds: Iterable[int], store_class: type[MemoryStore] = MemoryStore) -> Found:
    """Each seed twice, in this process, which must be ``patched``."""
    found = Found()
    for seed in seeds:
        trace = simulate(plan_of(seed), store_class=store_class)
        again = simulate(plan_of(seed), store_class=store_class)
        found.seeds += 1
        found.points += trace.points
        found.events += len(trace.events)
        found.faults += trace.faults
        found.acts += trace.acts
        found.schedules.add(digest(trace))
        if digest(trace) != digest(again):
            found.differing.append(seed)
        what = violation(trace)
        if what:
            found.violations[seed] = what
    return found


def digest(trace: Trace) -> bytes:
    """Equal for runs in which the same happened in the same order, at the same times."""
    return hashlib.sha256(trace.text().encode()).digest()[:12]


def shrunk(trace: Trace, store_class: type[MemoryStore] = MemoryStore) -> Shrunk:
    def run(plan: Any, decisions: dict[Key, object] | None) -> Trace:
        return simulate(plan, decisions, store_class)

    return shrink(trace, run)


def table(found: Found, took_s: float) -> str:
    kinds = ", ".join(f"{kind} {found.faults[kind]}" for kind in (*FAULTS, *OPERATOR))
    names = sorted({act.partition(":")[0] for act in found.acts})
    rows = [
        ("seeds, each run twice", f"{found.seeds}"),
        ("steps", f"{found.points}"),
        ("different schedules", f"{len(found.schedules)}"),
        ("faults", f"{sum(found.faults.values())}: {kinds}"),
        ("acts and reads", f"{sum(found.acts.values())} of {len(names)}: {', '.join(names)}"),
        ("kinds of act and reply", f"{len(found.acts)}"),
        ("runs that differ from their repetition", f"{len(found.differing)}"),
        ("violations", f"{len(found.violations)}"),
        ("seeds/s", f"{found.seeds / max(took_s, 0.001):.1f}"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _explore_batch(seeds: range) -> Found:
    with patched():
        return explore(seeds)


def _batches(first: int, number: int) -> Iterator[range]:
    for begin in range(first, first + number, BATCH):
        yield range(begin, min(begin + BATCH, first + number))


def explore_in_processes(first: int, number: int, processes: int) -> Found:
    found, began = Found(), time.monotonic()
    shown_at = began
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for part in pool.imap_unordered(_explore_batch, _batches(first, number)):
            found.add(part)
            if time.monotonic() - shown_at > 15:
                shown_at = time.monotonic()
                print(
                    f"{found.seeds} of {number} seeds, {found.points} steps, "
                    f"{len(found.violations)} violations, {shown_at - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def replay(seed: int, *, minimal: bool) -> int:
    with patched():
        trace = simulate(plan_of(seed))
        print(trace.plan)
        print(trace.text())
        if digest(simulate(plan_of(seed))) != digest(trace):
            print(f"seed {seed}: its second run differs from its first")
            return 1
        what = violation(trace)
        print(f"seed {seed}: {what or 'no violation'}; {trace.points} steps")
        if what and minimal:
            print(story(shrunk(trace)))
        return 1 if what else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spec.simulation.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: %(default)s)")
    parser.add_argument("--shrink", type=int, default=3, help="how many violations are shrunk")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return replay(given.seed, minimal=given.shrink > 0)
    began = time.monotonic()
    found = explore_in_processes(given.first, given.seeds, given.processes)
    took_s = time.monotonic() - began
    for seed in found.differing:
        print(f"seed {seed}: its second run differs from its first")
    for seed, what in sorted(found.violations.items()):
        print(f"seed {seed}: {what}")
    with patched():
        for seed in itertools.islice(sorted(found.violations), given.shrink):
            print(f"\nseed {seed}, minimal (make simulate SEED={seed} shows all of it):")
            print(story(shrunk(simulate(plan_of(seed)))))
    print(table(found, took_s))
    return 1 if found.violations or found.differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
