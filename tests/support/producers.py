"""Producers that can be killed at any moment: processes that make one call each.

A server process imports the app once and forks for every call, which takes milliseconds; so a
test can kill hundreds of producers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]


class Producers:
    """``python -m <module>``, whose ``main`` is ``serve(call)``.

    ``launch(**job)`` forks a process that runs ``call(job)`` and returns its pid at once.
    """

    def __init__(self, module: str, *, env: Mapping[str, str], log_path: Path) -> None:
        self._command = [sys.executable, "-m", module]
        self._env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
        self._log_path = log_path
        self._mutex = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=self._env,
                text=True,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def launch(self, **job: Any) -> int:
        """Start one call. The pid of the process that makes it."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with self._mutex:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise AssertionError(f"the producers ended:\n{self._log_path.read_text()}")
        return int(answer)


def serve(call: Callable[[dict[str, Any]], None]) -> None:
    """Fork for every line of the standard input, and answer with the child's pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                call(json.loads(line))
            finally:
                sys.stderr.flush()
                os._exit(0)
        print(pid, flush=True)
