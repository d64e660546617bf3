"""One producer process: calls unique tasks all the time, one by one, several at once and in
chords, revokes some, and writes down what it was told.

Started by the stage as ``python -m tests.chaos.producers``; ends after SIGTERM.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import deque
from typing import Any

from celery import chord

import celery_unique
from tests.chaos import app
from tests.chaos.app import CHAOS, TASKS, journal

KEYS_PER_TASK: int = CHAOS["keys"]
CALLS_PER_S: float = CHAOS["calls_per_s"]

#: What a call gets whose task may be waiting, under an id of its own.
ADMITTED = ("created", "replaced", "rerun", "queued", "bypassed")

_ended = threading.Event()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _ended.set())
    producer = Producer(random.Random(CHAOS["seed"]))
    while not _ended.wait(producer.dice.expovariate(CALLS_PER_S)):
        producer.act()


class Producer:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self._number = 0
        #: Of its latest calls that were admitted: some are revoked, most of them while they wait.
        self._admitted: deque[str] = deque(maxlen=4)

    def act(self) -> None:
        rolled = self.dice.random()
        if rolled < 0.04:
            self._call_many()
        elif rolled < 0.08 and self._admitted:
            self._revoke(self.dice.choice(self._admitted))
        elif rolled < 0.11 and not CHAOS["tasks"]:
            self._call_chord()
        else:
            self._call(*self._one_call(self.dice.choice(TASKS)))

    def _next(self) -> str:
        self._number += 1
        return f"{CHAOS['role']}/{os.getpid()}/{self._number}"

    def _one_call(self, task: Any) -> tuple[Any, dict[str, Any]]:
        """A signature, and what is noted of its call."""
        argument: int | str = self.dice.randrange(KEYS_PER_TASK)
        call: dict[str, Any] = {"call": self._next(), "task": task.name, "pid": os.getpid()}
        if task is app.guarded:  # it has no key: each call is a task of its own
            argument = call["call"]
        call["arg"] = argument
        arguments: tuple[Any, ...] = (argument,)
        if task.name.endswith(".merging"):  # each call has a value of its own
            call["value"] = call["call"]
            arguments = (argument, [call["value"]])
        signature = task.signature(arguments, **_options(task, argument, self.dice))
        journal.note("call", **call)
        return signature, call

    def _call(self, signature: Any, call: dict[str, Any]) -> None:
        try:
            result = signature.apply_async()
        except Exception as error:
            result = error
        self._note(result, call)

    def _call_many(self) -> None:
        # A call without a key is not published together with others in one act.
        tasks = [task for task in TASKS if task is not app.guarded or not CHAOS["one_server"]]
        several = self.dice.randint(2, 6)
        calls = [self._one_call(self.dice.choice(tasks)) for _ in range(several)]
        journal.note("many", calls=[call["call"] for _, call in calls], pid=os.getpid())
        try:
            results = celery_unique.apply_many(signature for signature, _ in calls)
        except celery_unique.BatchInterrupted as error:
            results = [result or error for result in error.results]
        except Exception as error:
            results = [error] * several
        for result, (_, call) in zip(results, calls, strict=True):
            self._note(result, call)

    def _note(self, result: Any, call: dict[str, Any]) -> None:
        if isinstance(result, celery_unique.DuplicateTask):
            journal.note("called", id=result.task_id, outcome="rejected", **call)
        elif isinstance(result, Exception):
            journal.note("refused", error=type(result).__name__, **call)
        else:
            journal.note("called", id=result.id, outcome=result.outcome, **call)
            if call["task"] == app.guarded.name and CHAOS["one_server"]:
                # No signal of the library reports it.
                journal.note("published", id=result.id, role=CHAOS["role"], pid=os.getpid())
            if result.outcome in ADMITTED:
                self._admitted.append(result.id)

    def _revoke(self, task_id: str) -> None:
        facts = {"revoke": self._next(), "id": task_id, "pid": os.getpid()}
        journal.note("revoke", **facts)
        try:
            app.app.control.revoke(task_id)
        except Exception as error:
            journal.note("revoke_failed", error=type(error).__name__, **facts)
        else:
            journal.note("revoked", **facts)

    def _call_chord(self) -> None:
        """Its members are duplicates, of each other and of those of other chords."""
        arguments = [self.dice.randrange(KEYS_PER_TASK) for _ in range(self.dice.randint(2, 4))]
        arguments.append(arguments[0])
        facts = {"chord": self._next(), "args": arguments, "pid": os.getpid()}
        body = app.chord_body.s(chord=facts["chord"])
        journal.note("chord", **facts)
        try:
            result = chord([app.member.s(argument) for argument in arguments], body).apply_async()
        except Exception as error:
            journal.note("chord_failed", error=type(error).__name__, **facts)
        else:
            members = [member.id for member in result.parent.results]
            journal.note("chord_called", members=members, body=result.id, **facts)


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
