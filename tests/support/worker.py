"""A real Celery worker in a process of its own."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from tests.support.process import LocalProcess

Pool = Literal["prefork", "threads", "solo", "gevent", "eventlet"]

REPOSITORY = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


class Worker:
    """``celery -A <app> worker``, as a user would start it.

    ``app`` is what ``-A`` takes (``package.module`` or ``package.module:attribute``); directories
    in ``python_path`` come before the repository on the worker's import path. Gossip and mingle
    are off, which makes the worker ready a second sooner; ``args`` are added at the end. ``forked``
    is False for what must come before the import of Celery (`celery_forks`).
    """

    def __init__(
        self,
        app: str,
        *,
        log_path: Path,
        pool: Pool = "prefork",
        concurrency: int = 1,
        queues: Sequence[str] = (),
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python_path: Sequence[Path] = (),
        cwd: Path | None = None,
        log_level: str = "INFO",
        name: str | None = None,
        forked: bool = True,
    ) -> None:
        self.hostname = f"{name or f'worker{next(_numbers)}'}@{os.getpid()}.test"
        command = [
            *(sys.executable, "-m", "celery", "-A", app, "worker"),
            *("--pool", pool, "--concurrency", str(concurrency)),
            *("--hostname", self.hostname, "--loglevel", log_level),
            *("--without-gossip", "--without-mingle"),
            *(("--queues", ",".join(queues)) if queues else ()),
            *args,
        ]
        import_path = [*map(str, python_path), str(REPOSITORY)]
        inherited = os.environ.get("PYTHONPATH")
        self._process = LocalProcess(
            command,
            log_path=log_path,
            cwd=cwd or REPOSITORY,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": os.pathsep.join([*import_path, *([inherited] if inherited else [])]),
                **(env or {}),
            },
            forked=forked and pool not in ("gevent", "eventlet"),
        )

    def start(self, *, timeout: float = 60.0) -> Self:
        """Start and wait until the worker consumes."""
        self.launch()
        self.wait_for_log(rf"{re.escape(self.hostname)} ready\.", timeout)
        return self

    def launch(self) -> None:
        """Start without waiting, for a worker that is expected to refuse."""
        self._process.start()

    def stop(self, *, timeout: float = 40.0) -> int:
        """Warm shutdown: SIGTERM to the main process, which ends what it runs. Returns the exit
        code; a worker that does not end in time is killed and the test fails."""
        return self._process.stop(signal.SIGTERM, timeout=timeout)

    def kill(self) -> None:
        """SIGKILL the main process and its pool together; without effect on an ended worker."""
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the main process alone."""
        self._process.send_signal(number)

    def sigstop(self) -> None:
        """Freeze the main process and its pool."""
        self._process.signal_group(signal.SIGSTOP)

    def sigcont(self) -> None:
        self._process.signal_group(signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exit_code

    def is_running(self) -> bool:
        return self._process.is_running()

    def children(self) -> list[int]:
        """The pids of the pool's processes."""
        return self._process.children()

    def log(self) -> str:
        return self._process.log()

    def wait_for_log(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        """Wait until the log matches the regular expression; returns the match."""
        return self._process.wait_for_log(pattern, timeout)
