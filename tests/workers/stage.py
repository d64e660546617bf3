"""A worker, the app that calls it, and what a test asks of both."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

from celery import Celery

import celery_unique
from tests.support import Worker, eventually
from tests.workers.apps.ends import RETRIED, make_app

_numbers = itertools.count(1)


class Stage:
    """One broker and one Redis database, with a worker that is started when it is needed."""

    def __init__(
        self, broker: str, redis_url: str, directory: Path, *, pool: str = "prefork", **options: Any
    ) -> None:
        self.settings = {"broker": broker, "redis_url": redis_url, **options}
        self.pool = pool
        self.app: Celery = make_app(**self.settings)
        self.props = self.app.props
        self.workers: list[Worker] = []
        self._directory = directory

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    def start_worker(self, **options: Any) -> Worker:
        number = next(_numbers)
        options = {"concurrency": 2, "pool": self.pool, **options}
        worker = Worker(
            "tests.workers.apps.ends_worker",
            log_path=self._directory / f"worker{number}.log",
            env={"ENDS_APP": json.dumps(self.settings)},
            name=f"ends{number}",
            **options,
        )
        self.workers.append(worker)
        return worker.start()

    def ensure_worker(self) -> None:
        """A worker that the last test has ended is replaced."""
        if not self.workers or not self.worker.is_running():
            self.start_worker()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        gc.collect()  # results unsubscribe when they go, which needs the server
        self.app.close()

    def log(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)

    # -- calls ---------------------------------------------------------------

    def call(self, task: str, *args: Any, **options: Any) -> Any:
        """Call a unique task that nobody else has called: it is admitted."""
        result = self.app.tasks[task].apply_async(args, **options)
        assert result.outcome == "created", f"{task}{args} found {self.lock(task, *args)}"
        return result

    def duplicate(self, task: str, *args: Any) -> Any:
        """Call a task whose key is held: it is not published."""
        result = self.app.tasks[task].apply_async(args)
        assert result.deduplicated, f"{task}{args} was admitted"
        return result

    def end_of(self, result: Any, state: str) -> Any:
        """Wait until the result is there, and return it."""
        value = result.get(timeout=20, propagate=False, disable_sync_subtasks=False)
        assert result.state == state, self.log()[-4000:]
        return value

    def wait_for_result(self, result: Any, state: str, value: Any = None) -> None:
        """Asks anew each time: an AsyncResult keeps the first final state that it has seen."""

        def look() -> bool:
            fresh = self.app.AsyncResult(result.id)
            return fresh.state == state and (value is None or fresh.result == value)

        eventually(look, message=f"{result.id} did not become {state}")

    def deliver_retry(self) -> None:
        """Give the worker the retry of a task that is ``RetriedElsewhere``."""
        eventually(
            lambda: self.props.redis.lmove(RETRIED, "celery", "RIGHT", "LEFT"),
            message="no retry was published",
        )

    # -- locks ---------------------------------------------------------------

    def lock(self, task: str, *args: Any) -> celery_unique.Lock | None:
        return celery_unique.lookup(task, args, app=self.app)

    def key(self, task: str, *args: Any) -> str:
        from celery_unique.config.app_state import state_of
        from celery_unique.locks import key_of_call

        return key_of_call(state_of(self.app), task, args, None)

    def wait_for_state(self, task: str, *args: Any, state: str) -> celery_unique.Lock:
        def look() -> celery_unique.Lock | None:
            lock = self.lock(task, *args)
            return lock if lock is not None and lock.state == state else None

        return eventually(look, message=f"the lock of {task}{args} did not become {state}")

    def wait_until_free(self, task: str, *args: Any, timeout: float = 20.0) -> None:
        eventually(
            lambda: self.lock(task, *args) is None,
            timeout=timeout,
            message=f"the key of {task}{args} was not given back",
        )

    def wait_for_run(self, tag: str, number: int = 1) -> int:
        """The process of the run with this number."""
        eventually(lambda: self.props.runs(tag) >= number, message=f"{tag} does not run")
        return self.props.pids(tag)[number - 1]

    # -- what is left ----------------------------------------------------------

    def left(self, key: str) -> list[str]:
        """The names in Redis that belong to a key."""
        return [str(name) for name in self.props.redis.scan_iter(match=f"cu:*{key}*")]

    def assert_nothing_left(self, result: Any) -> None:
        eventually(
            lambda: not self.left(result.unique_key),
            message=f"left in Redis for {result.id}",
        )

    def assert_only_a_mark_left(self, result: Any, kind: str = "done") -> None:
        """The message may exist twice, so that its end is remembered; no task is."""
        store = celery_unique.config.app_state.state_of(self.app).store

        def look() -> bool:
            record, _ = store.read(result.unique_key)
            return not record.tasks

        eventually(look, message="a task is left")
        record, _ = store.read(result.unique_key)
        assert {task_id: mark.kind for task_id, mark in record.marks.items()} == {result.id: kind}
        [name] = self.left(result.unique_key)
        assert self.props.redis.pttl(name) > 0

    def assert_released(self, result: Any, *reasons: str) -> None:
        """The key was given back for these reasons, and nothing else happened to the lock."""

        def told() -> list[dict[str, str]]:
            return self.props.told(result.id)

        eventually(lambda: len(told()) >= len(reasons), message="the key was not given back")
        assert told() == [{"signal": "unique_released", "reason": reason} for reason in reasons]
