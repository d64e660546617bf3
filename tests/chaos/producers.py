"""One producer process: calls unique tasks all the time and writes down what it was told.

Started by the stage as ``python -m tests.chaos.producers``; ends after SIGTERM.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

from tests.chaos.app import CHAOS, TASKS, journal

KEYS_PER_TASK: int = CHAOS["keys"]
CALLS_PER_S: float = CHAOS["calls_per_s"]

_ended = threading.Event()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _ended.set())
    dice = random.Random(CHAOS["seed"])
    number = 0
    while not _ended.wait(dice.expovariate(CALLS_PER_S)):
        number += 1
        _call(number, dice)


def _call(number: int, dice: random.Random) -> None:
    task = dice.choice(TASKS)
    argument = dice.randrange(KEYS_PER_TASK)
    options: dict[str, Any] = {}
    if dice.random() < 0.1:
        options["countdown"] = dice.uniform(0.1, 1.0)
    call = {
        "call": f"{CHAOS['role']}/{os.getpid()}/{number}",
        "task": task.name,
        "arg": argument,
        "pid": os.getpid(),
    }
    journal.note("call", **call)
    try:
        result = task.apply_async((argument,), **options)
    except Exception as error:
        journal.note("refused", error=type(error).__name__, **call)
    else:
        journal.note("called", id=result.id, outcome=result.outcome, **call)


if __name__ == "__main__":
    main()
