"""Many calls under one fault at a time, and without any, on every lock store: how many are lost and
how many run twice.

Each run is added to docs/explanation/evidence.json, from which the tables of
docs/explanation/evidence.md are made. The next run is that of which the fewest calls are there, so
that several short soaks add up to a long one. Ends with code 1 after a violation.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import celery

from tests.chaos import rate
from tests.chaos import run as chaos
from tests.chaos.evidence import (
    HISTORY,
    NONE,
    REPOSITORY,
    WANTED_UNDER,
    WANTED_WITHOUT,
    Soaked,
    read_history,
    write_history,
    write_page,
)
from tests.chaos.faults import kinds_of
from tests.chaos.previous import PREVIOUS, previous_release
from tests.chaos.report import Report

#: Broker, store and fault of a run.
Cell = tuple[str, str, str]
#: Callers and workers of this release and of the previous one. One that is killed is followed by
#: one of the other.
MIXED = "mixed versions"
MIXED_KINDS = [NONE, "worker killed", "producer killed"]
LOST = ("lost", "swallowed")
DUPLICATED = ("overlap", "superseded", "twice")
LOST_WITH_REASON = (*LOST, "lost by broker", "lost with record")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    cells = [
        (broker, store, fault)
        for broker, store, fault in all_cells()
        if store == (options.store or store) and fault == (options.fault or fault)
    ]
    if not cells:
        print(f"no run has the store {options.store} and the fault {options.fault}")
        return 2
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    dice = random.Random(options.seed)
    ends = time.monotonic() + options.hours * 3600
    print(f"logs in {place}", flush=True)
    commit = _commit()  # of the code that runs, whatever is changed meanwhile
    passed, number = True, 0
    while time.monotonic() < ends:
        number += 1
        cell = next_cell(cells, read_history())
        directory = place / f"{number}-{'-'.join(cell)}".replace(" ", "-")
        directory.mkdir()
        seconds = min(options.minutes * 60, max(20.0, ends - time.monotonic()))
        done = _soak(cell, commit, dice.randrange(100_000), seconds, directory)
        print(f"{_left(ends)} {' | '.join(cell)}: {_line(done)}", flush=True)
        # Read again: another soak may have added to it.
        write_history([*read_history(), done])
        write_page()
        passed = passed and done.passed
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="how long runs are begun")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each run (default: 3)")
    parser.add_argument("--store", choices=chaos.STORES, help="only runs with this lock store")
    parser.add_argument("--fault", help="only this one, as the table names it; none: without")
    parser.add_argument("--seed", type=int, help="of the seeds of the runs (default: random)")
    return parser


def all_cells() -> list[Cell]:
    return [
        (broker, store, fault)
        for broker, store in chaos.SETUPS
        for fault in (*kinds_of(chaos.plan_of(broker, store)), MIXED)
        # The messages of a run without faults are in Redis: the brokers are compared elsewhere.
        if fault != NONE or broker != "rabbitmq"
    ]


def next_cell(cells: Iterable[Cell], history: Iterable[Soaked]) -> Cell:
    """The fault that lacks the largest part of what is wanted, on the store with the fewest calls
    under it."""
    calls: dict[Cell, int] = dict.fromkeys(cells, 0)
    for each in history:
        cell = (each.broker, each.store, each.fault)
        if cell in calls:
            calls[cell] += each.calls

    def wanted(fault: str) -> int:
        return WANTED_WITHOUT if fault == NONE else WANTED_UNDER

    def reached(fault: str) -> float:
        return sum(number for cell, number in calls.items() if cell[2] == fault) / wanted(fault)

    fault = min((cell[2] for cell in calls), key=reached)
    return min((cell for cell in calls if cell[2] == fault), key=lambda cell: calls[cell])


def _soak(cell: Cell, commit: str, seed: int, seconds: float, directory: Path) -> Soaked:
    broker, store, fault = cell
    began = time.monotonic()
    if fault == NONE:
        counted = _without(broker, store, seed, seconds, directory)
    else:
        previous = str(previous_release(PREVIOUS, directory)) if fault == MIXED else ""
        plan = replace(chaos.plan_of(broker, store), seed=seed, previous=previous)
        kinds = MIXED_KINDS if fault == MIXED else [fault]
        report = chaos.run(plan, directory, seconds, 10.0, kinds)
        (directory / "report.txt").write_text(report.text())
        if not report.passed:
            print(report.text(), flush=True)
        counted = counts(report)
    return Soaked(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=_machine(),
        broker=broker,
        store=store,
        fault=fault,
        seed=seed,
        seconds=round(time.monotonic() - began),
        **counted,
    )


def _without(broker: str, store: str, seed: int, seconds: float, directory: Path) -> dict[str, int]:
    account = rate.run(broker, store, seed, seconds, directory)
    return {
        "calls": account.calls,
        "runs": account.runs,
        "lost": account.lost,
        "duplicated": account.duplicated,
        "other": account.left,
        "excused_lost": 0,
        "excused_duplicated": 0,
    }


def counts(report: Report) -> dict[str, int]:
    violations = report.violations
    return {
        "calls": sum(call.outcome not in ("", "refused") for call in report.story.calls),
        "runs": len(report.story.runs),
        "lost": report.count(*LOST, explained=False),
        "duplicated": report.count(*DUPLICATED, explained=False),
        "other": sum(found.what not in (*LOST, *DUPLICATED) for found in violations),
        "excused_lost": report.count(*LOST_WITH_REASON, explained=True),
        "excused_duplicated": report.count(*DUPLICATED, explained=True),
    }


def _line(done: Soaked) -> str:
    return (
        f"{done.calls:,} calls, {done.runs:,} runs in {done.seconds} s; lost {done.lost}, "
        f"duplicated {done.duplicated}, other {done.other}; explained: "
        f"lost {done.excused_lost}, duplicated {done.excused_duplicated}"
        f"{'' if done.passed else '  VIOLATION'}"
    )


def _left(ends: float) -> str:
    minutes = max(0.0, ends - time.monotonic()) / 60
    return f"[{datetime.now(UTC):%H:%M:%S}, {minutes:.0f} min left]"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    # The history and its page change with every run.
    changed = git("status", "--porcelain", "--", "celery_unique", "tests/chaos")
    return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")


def _machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, Celery {celery.__version__}"
    )


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    print(f"history: {HISTORY}")
    sys.exit(main())
