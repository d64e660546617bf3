"""One producer process: calls unique tasks all the time and writes down what it was told.

Started by the stage as ``python -m tests.chaos.producers``; ends after SIGTERM.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import celery_unique
from tests.chaos import app
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
    argument: int | str = dice.randrange(KEYS_PER_TASK)
    if task is app.guarded:  # it has no key: each call is a task of its own
        argument = f"{CHAOS['role']}/{number}"
    call: dict[str, Any] = {
        "call": f"{CHAOS['role']}/{os.getpid()}/{number}",
        "task": task.name,
        "arg": argument,
        "pid": os.getpid(),
    }
    arguments: tuple[Any, ...] = (argument,)
    if task.name.endswith(".merging"):  # each call has a value of its own
        call["value"] = call["call"]
        arguments = (argument, [call["value"]])
    journal.note("call", **call)
    try:
        result = task.apply_async(arguments, **_options(task, argument, dice))
    except celery_unique.DuplicateTask as error:
        journal.note("called", id=error.task_id, outcome="rejected", **call)
    except Exception as error:
        journal.note("refused", error=type(error).__name__, **call)
    else:
        journal.note("called", id=result.id, outcome=result.outcome, **call)
        if task is app.guarded and CHAOS["one_server"]:  # no signal of the library reports it
            journal.note("published", id=result.id, role=CHAOS["role"], pid=os.getpid())


def _options(task: Any, argument: object, dice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    delayed = (app.debounced.name, app.rescheduling.name, "tests.chaos.app.merging")
    if dice.random() < 0.1 or task.name in delayed:
        options["countdown"] = dice.uniform(0.1, 1.0)
    if task is app.keyed:
        options |= {"idempotency_key": str(argument), "idempotency_ttl": app.KEYED_S}
    return options


if __name__ == "__main__":
    main()
