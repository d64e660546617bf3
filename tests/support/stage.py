"""A worker, the app that calls it, and what a test asks of both."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
from collections.abc import Iterable
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from celery import Celery

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.locks import key_of_call
from celery_unique.stores.record import Record, TaskEntry
from tests.support.app import make_app
from tests.support.props import Props
from tests.support.waiting import eventually
from tests.support.worker import REPOSITORY, Worker

#: In the environment of a process: the arguments of ``staged_app``.
STAGED = "STAGED_APP"

#: Where retries wait that are looked at: no worker consumes it.
RETRIED = "retried"

_numbers = itertools.count(1)


def staged_app(
    tasks: str, *, broker: str, redis_url: str, backend: str = "", **settings: Any
) -> Celery:
    """The app of a worker and of the test that calls it, with the tasks of ``tests.workers.apps``.

    ``redis_url`` has the props, and the results and locks unless the settings say otherwise.
    """
    module = import_module(f"tests.workers.apps.{tasks}")
    conf = {
        "unique_store_url": redis_url,
        "broker_connection_retry_on_startup": True,
        "result_expires": 60,
        **module.CONF,
        **getattr(module, "prepare", dict)(**settings),
    }
    app = make_app(name=tasks, broker=broker, backend=backend or redis_url, **conf)
    app.props = Props(redis_url)
    # Not shared: a test process has several such apps, each with tasks of its own.
    module.define(app, partial(app.task, shared=False), app.props)
    return app


def forget_results(app: Celery) -> None:
    """A result that goes after its server would try for seconds to unsubscribe."""
    app.backend.remove_pending_result = lambda result: result


class Stage:
    """One broker and one Redis database, with as many workers as a test starts."""

    def __init__(
        self,
        tasks: str,
        directory: Path,
        *,
        broker: str,
        redis_url: str,
        pool: str = "prefork",
        concurrency: int = 1,
        app_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """``app_settings`` are for the calling app alone."""
        self.settings = {"tasks": tasks, "broker": broker, "redis_url": redis_url, **settings}
        self.pool = pool
        self.workers: list[Worker] = []
        self.directory = directory
        self._concurrency = concurrency
        self._app_settings = app_settings or {}

    @cached_property
    def app(self) -> Celery:
        return staged_app(**{**self.settings, **self._app_settings})

    @property
    def props(self) -> Props:
        props: Props = self.app.props
        return props

    @property
    def env(self) -> dict[str, str]:
        """For a process that makes the same app."""
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), STAGED: json.dumps(self.settings)}

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

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
        worker = Worker(
            "tests.workers.apps.staged",
            log_path=self.directory / f"worker{number}.log",
            env={STAGED: json.dumps({**self.settings, **(settings or {})}), **(env or {})},
            **{
                "name": f"{self.settings['tasks']}{number}",
                "concurrency": self._concurrency,
                "pool": self.pool,
                **options,
            },
        )
        self.workers.append(worker)
        if wait:
            worker.start()
        else:
            worker.launch()
        return worker

    def ensure_worker(self, **options: Any) -> Worker:
        """A worker that the last test has ended is replaced."""
        if not self.workers or not self.worker.is_running():
            self.start_worker(**options)
        return self.worker

    def wait_until_ready(self, *workers: Worker) -> None:
        """For workers that were started at the same time, without waiting."""
        for worker in workers:
            worker.wait_for_log(r" ready\.", 60)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        if "app" in self.__dict__:
            forget_results(self.app)
            gc.collect()
            self.app.close()

    def log(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)

    # -- calls ---------------------------------------------------------------

    def call(self, task: str, *args: Any, **options: Any) -> Any:
        """Call a unique task that nobody else has called: it is admitted."""
        result = self.app.tasks[task].apply_async(args, **options)
        assert result.outcome == "created", f"{task}{args} found {self.lock(task, *args)}"
        return result

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].apply_async(args, **options)

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
        eventually(lambda: self._move(RETRIED), message="no retry was published")

    def deliver(self, queue: str) -> None:
        """Give the worker what waits in a queue that it does not consume."""
        assert self._move(queue), f"nothing waits in {queue}"

    def _move(self, queue: str) -> Any:
        return self.props.redis.lmove(queue, "celery", "RIGHT", "LEFT")

    # -- locks ---------------------------------------------------------------

    def lock(self, task: str, *args: Any) -> celery_unique.Lock | None:
        return celery_unique.lookup(task, args, app=self.app)

    def key(self, task: str, *args: Any) -> str:
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
        key = result.unique_key
        eventually(lambda: not self.record_of(key).tasks, message="a task is left")
        record = self.record_of(key)
        assert {task_id: mark.kind for task_id, mark in record.marks.items()} == {result.id: kind}
        [name] = self.left(key)
        assert self.props.redis.pttl(name) > 0

    def assert_released(self, result: Any, *reasons: str) -> None:
        """The key was given back for these reasons, and nothing else happened to the lock."""

        def told() -> list[tuple[str, str]]:
            facts = self.props.told(result.id)
            return [
                (fact["signal"], fact["reason"])
                for fact in facts
                if fact["signal"] != "task_revoked"
            ]

        eventually(lambda: len(told()) >= len(reasons), message="the key was not released")
        assert told() == [("unique_released", reason) for reason in reasons]

    # -- what the store knows ------------------------------------------------

    def record_of(self, key: str) -> Record:
        record, _ = state_of(self.app).store.read(key)
        return record

    def record(self, task: str, *args: Any) -> Record:
        return self.record_of(self.key(task, *args))

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

    # -- what happened ---------------------------------------------------------

    def runs(self, tag: str) -> list[dict[str, Any]]:
        return self.props.notes(tag, "run")

    def values(self, tag: str) -> list[int]:
        return [run["value"] for run in self.runs(tag)]

    def wait_for_runs(self, tag: str, number: int = 1, timeout: float = 20.0) -> list[int]:
        eventually(
            lambda: len(self.runs(tag)) >= number,
            timeout=timeout,
            message=f"{tag} did not run {number} times",
        )
        return self.values(tag)

    def wait_until_nothing_is_left(self, key: str, timeout: float = 20.0) -> None:
        """No task and no mark: every message that was to be dropped was reached."""
        eventually(lambda: not self.record_of(key), timeout=timeout, message="something is left")

    def wait_until_worker_has(self, task_ids: Iterable[str]) -> None:
        """Their messages are in a worker's hands: a message that Redis has handed out and kombu
        has not noted down yet is lost with its worker, with or without unique tasks."""

        def noted_down() -> bool:
            messages = "".join(self.props.redis.hvals("unacked"))
            return all(task_id in messages for task_id in task_ids)

        eventually(noted_down, timeout=20, message="no worker has the messages")

    def told_revoked(self, task_id: str) -> list[dict[str, Any]]:
        return self.signals(task_id, "task_revoked")

    def superseded_by(self, task_id: str) -> str | None:
        """From the result backend: None where the task was not superseded."""
        meta = self.app.backend.get_task_meta(task_id)
        if meta["status"] != "REVOKED":
            return None
        found = re.fullmatch(r"superseded by task (\S+)", str(meta["result"]))
        return found[1] if found else f"nobody: {meta['result']}"
