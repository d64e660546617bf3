"""Flower, the monitor, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.support.process import LocalProcess
from tests.support.server import HOST, free_port
from tests.support.waiting import eventually
from tests.support.worker import REPOSITORY


class Flower:
    """``celery -A <app> flower``. Start the worker first: Flower asks for workers only once."""

    def __init__(self, app: str, *, log_path: Path, env: dict[str, str]) -> None:
        self.port = free_port()
        self._process = LocalProcess(
            [
                *(sys.executable, "-m", "celery", "-A", app, "flower"),
                *(f"--address={HOST}", f"--port={self.port}"),
            ],
            log_path=log_path,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "FLOWER_UNAUTHENTICATED_API": "true",
                **env,
            },
        )

    def start(self, hostname: str) -> Self:
        """Returns once Flower has heard an event of the worker with this name."""
        self._process.start()
        eventually(
            lambda: self._process.is_running() and self._has_heard(hostname),
            timeout=60,
            message=f"Flower did not hear {hostname}",
        )
        return self

    def _has_heard(self, hostname: str) -> bool:
        try:
            return hostname in self.workers()
        except OSError:
            return False

    def stop(self) -> None:
        self._process.kill()

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url(path), timeout=20) as reply:
            return json.load(reply)

    def post(self, path: str, **document: Any) -> Any:
        request = urllib.request.Request(self.url(path), json.dumps(document).encode())
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.load(reply)

    def workers(self) -> dict[str, bool]:
        """Every worker that Flower has heard of, and whether it is online."""
        status: dict[str, bool] = self.get("/api/workers?status=1")
        return status

    def tasks(self, **filters: str) -> dict[str, dict[str, Any]]:
        query = "&".join(f"{name}={value}" for name, value in filters.items())
        found: dict[str, dict[str, Any]] = self.get(f"/api/tasks?{query}")
        return found

    def log(self) -> str:
        return self._process.log()
