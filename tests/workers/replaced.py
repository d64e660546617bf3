"""Calls that replace each other, and a judge of what became of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from celery_unique import DuplicateTask
from celery_unique.stores.acts.blocking import in_limbo
from celery_unique.stores.record import Record
from tests.stores.racing import Round
from tests.support.stage import Stage, staged_app


class Watcher:
    """Reads the record of a key as fast as it can, and keeps every moment with two live tasks."""

    def __init__(self, stage: Stage, key: str) -> None:
        self.looks = 0
        self.most_in_limbo = 0
        self.with_one = 0
        self.wrong: list[list[str]] = []
        self._read = lambda: stage.record_of(key)
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            while not self._stop.wait(0.001):
                self.see(self._read())
        except Exception as error:  # a watcher that fell asleep has seen nothing
            self._error = error

    def see(self, record: Record) -> None:
        live = [i for i, task in record.tasks.items() if not task.terminal and not task.released]
        holders = [i for i in live if not in_limbo(record, record.tasks[i])]
        self.looks += 1
        self.with_one += len(holders) == 1
        self.most_in_limbo = max(self.most_in_limbo, len(live) - len(holders))
        if len(holders) > 1:
            self.wrong.append(holders)


# -- many processes that replace ------------------------------------------------------


class Replaced(NamedTuple):
    """What one accepted call heard, and how often it was rejected before."""

    task_id: str
    outcome: str
    rejected: int


def replace_racer(settings: Mapping[str, Any], tag: str, process: int) -> Round:
    """In every round all processes replace the same key; a rejected call is made again."""
    app = staged_app(**settings)
    task = app.tasks["work"]
    task.apply_async((f"warm-up-{process}", 0), queue="nobody")

    def play(number: int) -> Any:
        for rejected in itertools.count():
            try:
                result = task.apply_async((tag, number * 100 + process))
            except DuplicateTask:
                continue
            return Replaced(result.id, result.outcome, rejected)
        raise AssertionError

    return play


# -- the judge --------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """A call that was told that its task is published."""

    task_id: str
    began: float
    ended: float


def judge(
    calls: Sequence[Accepted], runs: Iterable[str], superseded: Mapping[str, str]
) -> list[str]:
    """What is wrong: every accepted call ran once, or gave way to a later one of which the
    same is true; and one of the last calls ran. Empty when all is right."""
    by_id = {call.task_id: call for call in calls}
    ran = list(runs)
    wrong = [
        f"{task_id} ran {ran.count(task_id)} times" for task_id in {*ran} if ran.count(task_id) > 1
    ]
    wrong += [f"{task_id} ran, but no call was told so" for task_id in {*ran} - {*by_id}]
    for call in calls:
        by = superseded.get(call.task_id)
        if by is None:
            if call.task_id not in ran:
                wrong.append(f"{call.task_id} vanished")
            continue
        if call.task_id in ran:
            wrong.append(f"{call.task_id} ran although it was superseded")
        if by not in by_id:
            wrong.append(f"{call.task_id} gave way to {by}, which nobody called")
        elif by_id[by].ended < call.began:
            wrong.append(f"{call.task_id} gave way to the earlier {by}")
        elif not _leads_to_a_run(call.task_id, superseded, ran):
            wrong.append(f"{call.task_id} gave way to tasks of which none ran")
    last_begin = max(call.began for call in calls)
    if not any(call.ended >= last_begin and call.task_id in ran for call in calls):
        wrong.append("none of the last calls ran")
    return wrong


def _leads_to_a_run(task_id: str, superseded: Mapping[str, str], ran: Sequence[str]) -> bool:
    seen: set[str] = set()
    while task_id in superseded and task_id not in seen:
        seen.add(task_id)
        task_id = superseded[task_id]
    return task_id in ran
