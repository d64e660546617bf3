"""An operator's desk: the ``celery`` command as a person or a script runs it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.stores.base import LockStore
from tests.support import Worker
from tests.support.forking import COMMAND, run_celery
from tests.support.worker import REPOSITORY, Pool

APP = "tests.workers.apps.operated"
_numbers = itertools.count(1)

#: For a worker of a loaded machine; the doctor waits for it once.
ANSWERS_WITHIN_S = "2.5"


@dataclass
class Done:
    code: int
    out: str
    err: str
    peak_kib: int = 0

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def json(self) -> Any:
        [line] = self.lines
        return json.loads(line)

    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.lines]


@dataclass
class Desk:
    """One broker and one lock store, and commands about them."""

    broker: str
    store_url: str
    directory: Path
    conf: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.app = Celery("operated", set_as_current=False)
        self.app.conf.update(self.settings()["conf"])
        celery_unique.install(self.app)
        self.workers: list[Worker] = []

    def settings(self, *, conf: dict[str, Any] | None = None, **wrong: Any) -> dict[str, Any]:
        given = {
            "broker_url": self.broker,
            "unique_store_url": self.store_url,
            "task_default_queue": "operated",
            "result_backend": "cache+memory://",
            **self.conf,
            **(conf or {}),
        }
        return {"conf": given, **wrong}

    @property
    def store(self) -> LockStore:
        return state_of(self.app).store

    def environment(self, **settings: Any) -> dict[str, str]:
        # The width is the terminal's, or that of none: not of whatever runs the tests.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        return {
            **inherited,
            "PYTHONPATH": str(REPOSITORY),
            "OPERATED_APP": json.dumps(self.settings(**settings)),
        }

    def command(self, *arguments: str) -> list[str]:
        return [*COMMAND, "-A", APP, *arguments]

    def run(
        self,
        *arguments: str,
        stdin: str = "",
        before: Sequence[str] = (),
        timeout: float = 120,
        **settings: Any,
    ) -> Done:
        """``celery -A app ARGUMENTS``; ``before`` comes before the command."""
        command, env = self.command(*arguments), self.environment(**settings)
        if before:
            done = subprocess.run(
                [*before, *command],
                input=stdin,
                env=env,
                cwd=self.directory,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        else:
            done = run_celery(
                command[len(COMMAND) :], cwd=self.directory, env=env, stdin=stdin, timeout=timeout
            )
        return Done(done.returncode, done.stdout, done.stderr)

    def unique(self, *arguments: str, **options: Any) -> Done:
        return self.run("unique", *arguments, **options)

    def examine(self, **options: Any) -> Done:
        """``unique doctor --json``, again where a worker on a busy machine was too late for it."""
        for _ in range(3):
            done = self.unique("doctor", "--json", "--timeout", ANSWERS_WITHIN_S, **options)
            if self._all_have_answered(done.json()):
                break
        return done

    def _all_have_answered(self, told: dict[str, Any]) -> bool:
        running = sum(worker.is_running() for worker in self.workers)
        some_are_late = any(one["check"] == "workers" for one in told["findings"])
        return running == 0 or (len(told["workers"]) >= running and not some_are_late)

    def start(self, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(**settings),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start_worker(
        self,
        name: str,
        *,
        queues: Sequence[str] = (),
        pool: Pool = "threads",
        **settings: Any,
    ) -> Worker:
        worker = Worker(
            APP,
            log_path=self.directory / f"{name}{next(_numbers)}.log",
            env=self.environment(**settings),
            name=name,
            pool=pool,
            concurrency=1 if pool == "solo" else 2,
            queues=queues,
        )
        self.workers.append(worker)
        return worker.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.store.close()
        self.app.close()
