"""Workers that are killed, frozen and cut off, and a caller that asks all the time."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from celery import Celery

from celery_unique.config.app_state import state_of
from celery_unique.stores.record import Record, TaskEntry
from tests.support import Worker, eventually
from tests.workers.apps.faults import make_app
from tests.workers.stage import Stage

_numbers = itertools.count(1)


def let_go_of_results(app: Celery) -> None:
    """A result that goes after its server would try for seconds to unsubscribe."""
    app.backend.remove_pending_result = lambda result: result


class FaultStage(Stage):
    """A broker, a lock store and as many workers as a test asks for."""

    def __init__(
        self, broker: str, redis_url: str, directory: Path, *, pool: str = "prefork", **options: Any
    ) -> None:
        self.settings = {"broker": broker, "redis_url": redis_url, **options}
        self.pool = pool
        # The test's own way to the store is there all the time. A short time-out is for workers.
        self.app: Celery = make_app(**{**self.settings, "unique_store_timeout": 20})
        self.props = self.app.props
        self.workers: list[Worker] = []
        self._directory = directory

    def start_worker(
        self,
        *,
        wait: bool = True,
        settings: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Worker:
        """``settings`` differ from those of the calling app: a way of its own to a server."""
        number = next(_numbers)
        options = {"concurrency": 1, "pool": self.pool, **options}
        worker = Worker(
            "tests.workers.apps.faults_worker",
            log_path=self._directory / f"worker{number}.log",
            env={"FAULTS_APP": json.dumps({**self.settings, **(settings or {})}), **(env or {})},
            name=f"faults{number}",
            **options,
        )
        self.workers.append(worker)
        if wait:
            worker.start()
        else:
            worker.launch()
        return worker

    def close(self) -> None:
        let_go_of_results(self.app)
        super().close()

    def wait_until_ready(self, *workers: Worker) -> None:
        """For workers that were started at the same time, without waiting."""
        for worker in workers:
            worker.wait_for_log(r" ready\.", 40)

    def ensure_worker(self, **options: Any) -> Worker:
        if not self.workers or not self.worker.is_running():
            self.start_worker(**options)
        return self.worker

    # -- what the store knows ------------------------------------------------

    def record(self, task: str, *args: Any) -> Record:
        record, _ = state_of(self.app).store.read(self.key(task, *args))
        return record

    def entry(self, task: str, *args: Any) -> TaskEntry:
        """The one task that holds the key of a call."""
        [entry] = self.record(task, *args).tasks.values()
        return entry

    # -- what bodies and signals told -----------------------------------------

    def begins(self, tag: str) -> list[dict[str, Any]]:
        return self.props.notes(tag, "begin")

    def ends(self, tag: str) -> list[dict[str, Any]]:
        return self.props.notes(tag, "end")

    def wait_until_a_body_waits(self) -> None:
        """It has noted its begin, and now waits for the test's word: whoever waits longest gets
        the next one."""
        redis = self.props.redis
        database = str(redis.connection_pool.connection_kwargs.get("db", 0))

        def waits() -> bool:
            clients = redis.client_list()
            return any(one["cmd"] == "blpop" and one["db"] == database for one in clients)

        eventually(waits, message="no body waits for a word")

    def wait_for_begin(self, tag: str, number: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        eventually(
            lambda: len(self.begins(tag)) >= number,
            timeout=timeout,
            message=f"run {number} of {tag} did not begin",
        )
        return self.begins(tag)[number - 1]

    def signals(self, task_id: str, name: str) -> list[dict[str, Any]]:
        return [fact for fact in self.props.told(task_id) if fact["signal"] == name]

    def wait_for_signal(self, task_id: str, name: str, timeout: float = 20.0) -> dict[str, Any]:
        return eventually(
            lambda: self.signals(task_id, name),
            timeout=timeout,
            message=f"{name} was not sent for {task_id}",
        )[0]


@dataclass(frozen=True, slots=True)
class Answer:
    at: float
    outcome: str
    task_id: str


class Caller:
    """Calls one task again and again, from a thread, until it is told to stop.

    A call that was admitted is published like any other, so that later calls are its duplicates.
    """

    def __init__(self, stage: FaultStage, task: str, *args: Any, pause_s: float = 0.02) -> None:
        self.answers: list[Answer] = []
        self._task = stage.app.tasks[task]
        self._args = args
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._pause_s):
                result = self._task.apply_async(self._args)
                self.answers.append(Answer(time.time(), result.outcome, result.id))
        except BaseException as error:
            self._error = error

    def lasted_s(self) -> float:
        return self.answers[-1].at - self.answers[0].at if self.answers else 0.0

    @property
    def admitted(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.outcome != "deduplicated"]

    def wait_for_admission(self, timeout: float = 30.0) -> Answer:
        """As long as that because a busy machine must not matter: a key that does not lapse with
        its run lease stays taken for a queue lease, which is a day."""
        return eventually(
            lambda: self.admitted,
            timeout=timeout,
            message=f"none of the calls was admitted ({len(self.answers)} made)",
        )[0]
