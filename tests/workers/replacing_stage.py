"""A stage for calls that replace each other, and a judge of what became of them."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from celery import Celery

from celery_unique import DuplicateTask
from celery_unique.config.app_state import state_of
from celery_unique.stores.acts.replace import in_limbo
from celery_unique.stores.record import Record
from tests.stores.racing import Round
from tests.support import Worker, eventually
from tests.workers.apps.replacing import make_app
from tests.workers.stage import Stage

_numbers = itertools.count(1)


class ReplacingStage(Stage):
    def __init__(
        self, broker: str, redis_url: str, directory: Path, *, pool: str = "prefork", **options: Any
    ) -> None:
        self.settings = {"broker": broker, "redis_url": redis_url, **options}
        self.pool = pool
        self.app: Celery = make_app(**self.settings)
        self.props = self.app.props
        self.workers: list[Worker] = []
        self._directory = directory

    def start_worker(self, *, wait: bool = True, **options: Any) -> Worker:
        number = next(_numbers)
        options = {"concurrency": 1, "pool": self.pool, **options}
        worker = Worker(
            "tests.workers.apps.replacing_worker",
            log_path=self._directory / f"worker{number}.log",
            env={"REPLACING_APP": json.dumps(self.settings)},
            name=f"replacing{number}",
            **options,
        )
        self.workers.append(worker)
        worker.launch()
        if wait:
            worker.wait_for_log(r" ready\.", 40)
        return worker

    # -- calls -----------------------------------------------------------------

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].apply_async(args, **options)

    def deliver(self, queue: str) -> None:
        """Give the worker what waits in a queue that it does not consume."""
        moved = self.props.redis.lmove(queue, "celery", "RIGHT", "LEFT")
        assert moved, f"nothing waits in {queue}"

    # -- what happened ---------------------------------------------------------

    def runs(self, tag: str) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = self.props.notes(tag, "run")
        return notes

    def values(self, tag: str) -> list[int]:
        return [run["value"] for run in self.runs(tag)]

    def wait_for_runs(self, tag: str, number: int = 1, timeout: float = 20.0) -> list[int]:
        eventually(
            lambda: len(self.runs(tag)) >= number,
            timeout=timeout,
            message=f"{tag} did not run {number} times",
        )
        return self.values(tag)

    def record(self, key: str) -> Record:
        record, _ = state_of(self.app).store.read(key)
        return record

    def wait_until_nothing_is_left(self, key: str, timeout: float = 20.0) -> None:
        """No task and no mark: every message that was to be dropped was reached."""
        eventually(lambda: not self.record(key), timeout=timeout, message="something is left")

    def wait_until_worker_has(self, task_ids: Iterable[str]) -> None:
        """Their messages are in a worker's hands: a message that Redis has handed out and kombu
        has not noted down yet is lost with its worker, with or without unique tasks."""

        def noted_down() -> bool:
            messages = "".join(self.props.redis.hvals("unacked"))
            return all(task_id in messages for task_id in task_ids)

        eventually(noted_down, timeout=20, message="no worker has the messages")

    def told_revoked(self, task_id: str) -> list[dict[str, Any]]:
        return [fact for fact in self.props.told(task_id) if fact["signal"] == "task_revoked"]

    def superseded_by(self, task_id: str) -> str | None:
        """From the result backend: None where the task was not superseded."""
        meta = self.app.backend.get_task_meta(task_id)
        if meta["status"] != "REVOKED":
            return None
        found = re.fullmatch(r"superseded by task (\S+)", str(meta["result"]))
        return found[1] if found else f"nobody: {meta['result']}"


class Watcher:
    """Reads the record of a key as fast as it can, and keeps every moment with two live tasks."""

    def __init__(self, stage: ReplacingStage, key: str) -> None:
        self.looks = 0
        self.most_in_limbo = 0
        self.with_one = 0
        self.wrong: list[list[str]] = []
        self._read = lambda: stage.record(key)
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
    app = make_app(**settings)
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
