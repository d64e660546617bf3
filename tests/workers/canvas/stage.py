"""Workers with one pool, one for each result backend, and what all shapes came to on them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from celery import Celery

from tests.support import LocalProcess, RedisServer, Worker, eventually
from tests.support.worker import REPOSITORY
from tests.workers.canvas.app import SETTINGS, make_app

BACKENDS = ("redis", "database", "file", "rpc", "django-db")

#: More than the shapes that wait for each other need at once; a greenlet costs nothing.
CONCURRENCY = {"prefork": 2, "threads": 4, "gevent": 50, "solo": 1}

_MIGRATE = """
import sys
from functools import cached_property
from pathlib import Path
from tests.workers.canvas.app import set_up_django
set_up_django(Path(sys.argv[1]))
from django.core.management import call_command
call_command("migrate", verbosity=0)
"""


class CanvasStage:
    """One worker with one result backend. Broker and locks are in one Redis database."""

    def __init__(
        self,
        redis_server: RedisServer,
        directory: Path,
        pool: str,
        backend: str = "redis",
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.backend = backend
        self.redis_url = redis_server.fresh_url()
        self.settings = {**self._settings(backend), **settings}
        self.workers: list[Worker] = []
        self._pool = pool
        self._player: LocalProcess | None = None

    def _settings(self, backend: str) -> dict[str, Any]:
        url, directory = self.redis_url, self.directory
        settings: dict[str, Any] = {"broker": url, "redis_url": url}
        if backend == "django-db":
            settings["django_database"] = str(directory / "results.django")
            command = [sys.executable, "-c", _MIGRATE, settings["django_database"]]
            subprocess.run(command, check=True, cwd=REPOSITORY, env=self._env({}))
        if backend == "file":
            (directory / "results").mkdir()
        addresses = {
            "redis": url,
            "database": f"db+sqlite:///{directory / 'results.sqlite3'}?timeout=30",
            "file": f"file://{directory / 'results'}",
            "rpc": "rpc://",
            "django-db": "django-db",
        }
        return {**settings, "backend": addresses[backend]}

    def _env(self, settings: dict[str, Any]) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), SETTINGS: json.dumps(settings)}

    @cached_property
    def app(self) -> Celery:
        """The app of the test that calls. (Not with Django: that is set up for good.)"""
        app = make_app(**self.settings)
        app.set_current()
        return app

    def launch_worker(
        self,
        *,
        pool: str | None = None,
        env: dict[str, str] | None = None,
        queues: tuple[str, ...] = (),
        **settings: Any,
    ) -> Worker:
        pool = pool or self._pool
        number = len(self.workers) + 1
        worker = Worker(
            "tests.workers.canvas.worker",
            log_path=self.directory / f"worker{number}.log",
            env={SETTINGS: json.dumps({**self.settings, **settings}), **(env or {})},
            pool=pool,
            concurrency=CONCURRENCY[pool],
            name=f"canvas{number}",
            queues=queues,
        )
        self.workers.append(worker)
        worker.launch()
        return worker

    def start_worker(self, **options: Any) -> Worker:
        worker = self.launch_worker(**options)
        self.wait_for_worker()
        return worker

    def wait_for_worker(self) -> None:
        worker = self.workers[-1]
        worker.wait_for_log(rf"{worker.hostname} ready\.", 60)

    # -- the shapes --------------------------------------------------------------

    @property
    def _told(self) -> Path:
        return self.directory / "told.json"

    def play(self) -> None:
        """Apply every shape, in a process of its own: result backends are set up for good."""
        command = [sys.executable, "-m", "tests.workers.canvas.play", str(self._told)]
        self._player = LocalProcess(
            [*command, self.backend],
            log_path=self.directory / "player.log",
            cwd=REPOSITORY,
            env=self._env(self.settings),
        )
        self._player.start()

    def told(self) -> dict[str, Any]:
        """What the shapes came to, once all have ended."""
        player = self._player
        assert player is not None
        eventually(lambda: not player.is_running(), timeout=200, message="the player goes on")
        assert player.exit_code == 0, player.log()[-4000:]
        told: dict[str, Any] = json.loads(self._told.read_text())
        return told

    def log(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)

    def close(self) -> None:
        if self._player is not None:
            self._player.kill()
        for worker in self.workers:
            worker.kill()
        if "app" in self.__dict__:
            gc.collect()  # results unsubscribe when they go, which needs the server
            self.app.close()
