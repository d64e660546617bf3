"""Chaos: producers and workers on Redis and RabbitMQ while things die, stop and are cut off.

Prints a table for each broker with a line for each kind of fault, and ends with code 1, showing
the history of the key in question, when something happened that must not.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import checker
from tests.chaos.faults import Injector
from tests.chaos.journal import read
from tests.chaos.report import Report
from tests.chaos.stage import Plan, Stage

BROKERS = ("redis", "one redis", "rabbitmq")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    brokers = [options.broker] if options.broker else list(BROKERS)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10_000)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, logs in {directory}", flush=True)
    passed = True
    for broker in brokers:
        place = directory / broker.replace(" ", "-")
        place.mkdir(parents=True)
        plan = Plan(broker=broker, seed=seed, broken=options.broken)
        report = run(plan, place, options.minutes * 60 / len(brokers), options.episode)
        print(report.text(), flush=True)
        passed = passed and report.passed
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of faults, divided among the brokers"
    )
    parser.add_argument("--broker", choices=BROKERS, help="only this one")
    parser.add_argument("--seed", type=int, help="of the calls and the faults (default: random)")
    parser.add_argument(
        "--episode", type=float, default=10.0, help="seconds under one kind of fault"
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
    plan: Plan, directory: Path, seconds: float, episode_s: float, kinds: list[str] | None = None
) -> Report:
    """One run on one broker: faults, then quiet until the longest lease has passed.

    With 0 ``seconds`` there is one episode of each of the ``kinds``.
    """
    with Stage(plan, directory) as stage:
        injector = Injector(stage, random.Random(plan.seed))
        if seconds:
            injector.rounds(time.monotonic() + seconds, episode_s)
        else:
            injector.one_round(episode_s, kinds)
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
