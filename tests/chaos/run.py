"""Chaos: producers and workers while things die, stop and are cut off, on several brokers and lock
stores.

Prints a table for each of them with a line for each kind of fault, and ends with code 1, showing
the history of the key in question, when something happened that must not.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos import checker
from tests.chaos.faults import Injector, kinds_of
from tests.chaos.journal import read
from tests.chaos.previous import PREVIOUS, previous_release
from tests.chaos.report import Report
from tests.chaos.stage import Plan, Stage
from tests.support import eventually

BROKERS = ("redis", "one redis", "rabbitmq")
STORES = ("redis", "valkey", "sentinel", "cluster", "postgresql", "mariadb")
#: Broker and lock store of each run.
SETUPS = (*((broker, "redis") for broker in BROKERS), *(("redis", store) for store in STORES[1:]))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    setups = [
        (broker, store)
        for broker, store in SETUPS
        if broker == (options.broker or broker) and store == (options.store or store)
        if {*options.fault} <= {*kinds_of(plan_of(broker, store))}
    ]
    if not setups:
        print(f"no run has this broker, this store and these faults: {SETUPS}")
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10_000)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, logs in {directory}", flush=True)
    passed = True
    for broker, store in setups:
        place = directory / f"{broker}-{store}".replace(" ", "-")
        place.mkdir(parents=True)
        previous = str(previous_release(options.previous, place)) if options.previous else ""
        plan = replace(plan_of(broker, store), seed=seed, broken=options.broken, previous=previous)
        seconds = options.minutes * 60 / len(setups)
        report = run(plan, place, seconds, options.episode, options.fault)
        print(report.text(), flush=True)
        passed = passed and report.passed
    return 0 if passed else 1


def plan_of(broker: str, store: str) -> Plan:
    return Plan(broker=broker, store=store, seed=0, clock=True, disk=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of faults, divided among the runs"
    )
    parser.add_argument("--broker", choices=BROKERS, help="only runs with this one")
    parser.add_argument("--store", choices=STORES, help="only runs with this lock store")
    parser.add_argument("--seed", type=int, help="of the calls and the faults (default: random)")
    parser.add_argument(
        "--episode", type=float, default=10.0, help="seconds under one kind of fault"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        help="only this kind of fault, as the table names it; may be given several times",
    )
    parser.add_argument(
        "--previous",
        metavar="COMMIT",
        nargs="?",
        const=PREVIOUS,
        help="run every other caller and worker with the code of this commit (default: that of "
        "the previous release)",
    )
    parser.add_argument("--directory", type=Path, help="for the logs (default: a new one)")
    parser.add_argument(
        "--broken",
        choices=("acquire", "renew"),
        default="",
        help="break the lock store on purpose: the run must fail",
    )
    return parser


def run(
    plan: Plan,
    directory: Path,
    seconds: float,
    episode_s: float,
    kinds: list[str] | None = None,
    bodies: int = 0,
) -> Report:
    """One run on one broker: faults of these ``kinds``, or of all, then quiet until the longest
    lease has passed. With 0 ``seconds`` there is one episode of each. Calls are made until at least
    that many ``bodies`` have begun, however slow the machine is."""
    with Stage(plan, directory) as stage:
        injector = Injector(stage, random.Random(plan.seed))
        if seconds:
            injector.rounds(time.monotonic() + seconds, episode_s, kinds)
        else:
            injector.one_round(episode_s, kinds)
        eventually(lambda: stage.bodies_begun() >= bodies, timeout=120, interval=0.5)
        _end(stage)
    return checker.check(read(directory))


def _end(stage: Stage) -> None:
    plan = stage.plan
    stage.journal.note("episode", fault="afterwards")
    stage.stop_producers()
    # What was lost with a worker comes back after the visibility timeout, and may then wait for
    # the delivery lease of the dead one.
    drained = stage.drain(plan.visibility + plan.longest_lease + 3 * plan.run_lease)
    stage.journal.note("drained", ok=drained, waiting=stage.messages_waiting())
    # With the workers still there: one that renews what it does not hold is found out.
    _watch_locks(stage)
    # A follower of a task that was lost is published when its lock has lapsed, and may be the last
    # member of a chord.
    stage.drain(plan.run_lease)
    stage.stop_workers()
    stage.journal.note("ended", waiting=stage.messages_waiting())


def _watch_locks(stage: Stage) -> None:
    ends = time.monotonic() + stage.plan.longest_lease
    locks, marks = stage.locks()
    stage.journal.note("after_drain", locks=locks, marks=marks)
    while locks and time.monotonic() < ends:
        time.sleep(0.5)
        locks, marks = stage.locks()
    stage.journal.note("left", locks=locks, marks=marks)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # as for Ctrl-C: everything that was started ends
    sys.exit(main())
