"""One local process with its own process group, log file and end."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.support.forking import COMMAND, Fork
from tests.support.waiting import eventually

_alive: set[LocalProcess] = set()


class ProcessFailed(AssertionError):
    """A process ended or did not do in time what was waited for; the message holds its log."""


class LocalProcess:
    """A subprocess that leads its own process group and writes into one log file.

    ``forked``: a command of Celery's, as a fork of a process that has imported Celery.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        forked: bool = False,
    ) -> None:
        self.command = list(command)
        self.log_path = log_path
        self._cwd = cwd
        self._env = env
        self._user = user
        self._forked = forked
        self._process: subprocess.Popen[bytes] | Fork | None = None

    def start(self) -> None:
        if self.is_running():
            raise RuntimeError(f"{self.command[0]} is already running")
        with self.log_path.open("ab") as log:
            self._process = self._spawn(log)
        _alive.add(self)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes] | Fork:
        if self._forked:
            assert self.command[:3] == COMMAND
            cwd, env = self._cwd or Path.cwd(), os.environ if self._env is None else self._env
            return Fork(self.command[3:], cwd=cwd, env=env, out=self.log_path)
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._cwd,
            env=None if self._env is None else dict(self._env),
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} has not been started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def children(self) -> list[int]:
        """The pids of all living descendants."""
        return [process.pid for process in _descendants(self.pid)]

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process itself, and not its children."""
        os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM, *, timeout: float = 40.0) -> int:
        """Ask the process to end, wait for it and return its exit code.

        A process that does not end in time is killed and reported.
        """
        if not self.is_running():
            self.kill()
            return self.exit_code or 0
        descendants = _descendants(self.pid)
        # A stopped process would keep the signal for later.
        self.signal_group(signal.SIGCONT)
        self.send_signal(number)
        try:
            exit_code = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ProcessFailed(
                self._report(f"did not end within {timeout:g} s of {number.name}")
            ) from None
        _kill(descendants)
        _alive.discard(self)
        return exit_code

    def kill(self) -> None:
        """End the process group, and what left it (PostgreSQL's children do), with SIGKILL."""
        if self._process is None:
            return
        running = self.is_running()
        descendants = _descendants(self._process.pid) if running else []
        # Once it has ended its pid may be that of another process, with a group of its own. While
        # members of its own group are left, the kernel gives the number to nobody.
        if running or not psutil.pid_exists(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _kill(descendants)
        _alive.discard(self)

    def restart(self) -> None:
        """Ask it to end and start it again, with the same command and log."""
        self.stop()
        self.start()

    @property
    def _popen(self) -> subprocess.Popen[bytes] | Fork:
        assert self._process is not None
        return self._process

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def wait_for_log(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        """Wait until the log matches ``pattern``; an ended process ends the wait."""
        deadline = time.monotonic() + timeout
        while True:
            # Asked before the log is read, so that the last words of a process still count.
            running = self.is_running()
            found = re.search(pattern, self.log())
            if found:
                return found
            if not running:
                raise ProcessFailed(self._report(f"ended before its log matched {pattern!r}"))
            if time.monotonic() >= deadline:
                raise ProcessFailed(self._report(f"did not log {pattern!r} within {timeout:g} s"))
            time.sleep(0.02)

    def _report(self, what: str) -> str:
        return (
            f"{' '.join(self.command)}\n{what} (exit code {self.exit_code}).\n"
            f"The end of its log, {self.log_path}:\n{self.log_tail()}"
        )

    def failure(self, what: str) -> ProcessFailed:
        """An error about this process that shows the end of its log."""
        return ProcessFailed(self._report(what))


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    eventually(
        lambda: not any(is_alive(process.pid) for process in processes),
        timeout=10,
        message=f"processes that survived SIGKILL: {list(processes)}",
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs. An ended one that nobody has reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@atexit.register
def _kill_what_is_left() -> None:
    """A test run that is interrupted between two fixtures must leave nothing behind."""
    for process in list(_alive):
        process.kill()
