"""Celery's commands as forks of a process that has imported Celery: see ``celery_forks``."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("celery_forks.py")
COMMAND = [sys.executable, "-m", "celery"]

_mutex = threading.Lock()
#: The program and the connection to it; it also ends when that is closed.
_program: tuple[subprocess.Popen[bytes], Connection] | None = None


class Fork:
    """What ``LocalProcess`` asks of a process, of one that is not this one's own child."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        out: Path,
        errors: Path | None = None,
        stdin: Path = Path(os.devnull),
    ) -> None:
        self._exit_code: int | None = None
        files = tuple(str(path.resolve()) for path in (stdin, out, errors or out))
        self.pid: int = _ask("fork", list(arguments), str(cwd), dict(env), files)

    def poll(self) -> int | None:
        if self._exit_code is None:
            self._exit_code = _ask("exit code", self.pid)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (exit_code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("celery", timeout or 0)
            time.sleep(0.005)
        return exit_code


def run_celery(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of one of Celery's commands, with its output captured."""
    with tempfile.TemporaryDirectory() as directory:
        given, out, errors = (Path(directory, name) for name in ("in", "out", "errors"))
        for path, text in ((given, stdin), (out, ""), (errors, "")):
            path.write_text(text)
        fork = Fork(arguments, cwd=cwd, env=env, out=out, errors=errors, stdin=given)
        try:
            code = fork.wait(timeout)
        finally:
            if fork.poll() is None:
                os.killpg(fork.pid, signal.SIGKILL)
                fork.wait()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), errors.read_text())


def _ask(*order: Any) -> Any:
    global _program
    with _mutex:
        if _program is None:
            _program = _start()
        _, connection = _program
        connection.send(order)
        return connection.recv()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, its = Pipe()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with its:
        process = subprocess.Popen(
            # -P: its own directory is not on the import path.
            [sys.executable, "-P", str(PROGRAM), str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            env={**plain, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    return process, ours


@atexit.register
def _end() -> None:
    if _program is not None:
        process, _ = _program
        process.terminate()
        process.wait()
