"""The servers and workers of a run, each on a port of its own, stopped at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import redis

REPOSITORY = Path(__file__).resolve().parents[1]
START_S = 30.0


class Server:
    """A Redis server without persistence, in a directory that goes away with it."""

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            sys.exit("redis-server is not installed: run scripts/install-services")
        self.port = _free_port()
        self._directory = tempfile.mkdtemp(prefix="celery-unique-bench-")
        self._process = subprocess.Popen(
            [
                *(binary, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", self._directory),
                *("--databases", "64"),
            ],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(port=self.port, socket_timeout=120)
        _wait_until(self._answers, f"redis-server on port {self.port}")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            sys.exit(f"redis-server ended with code {self._process.returncode}")
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def used_memory(self) -> int:
        # What clients' buffers take is no part of a lock.
        memory = self.client.info("memory")
        return int(memory["used_memory"]) - int(memory.get("mem_clients_normal", 0))

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def server() -> Iterator[Server]:
    one = Server()
    try:
        yield one
    finally:
        one.stop()


class Workers:
    """One worker process for each contender."""

    def __init__(
        self, contenders: Sequence[str], broker: str, store: str, concurrency: int
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="celery-unique-bench-")
        self._log = (Path(self._directory) / "workers.log").open("w+b")
        self._urls = {"BENCH_BROKER": broker, "BENCH_STORE": store}
        self._processes = {name: self._start(name, concurrency) for name in contenders}

    def _start(self, name: str, concurrency: int) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            **self._urls,
            "BENCH_CONTENDER": name,
            "PYTHONPATH": str(REPOSITORY),
        }
        command = [
            *(sys.executable, "-m", "celery", "-A", "benchmarks.worker_app", "worker"),
            *("--pool", "prefork", "--concurrency", str(concurrency), "--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle"),
            *("--hostname", f"{name.replace(', ', '-').replace(' ', '-')}@bench"),
        ]
        return subprocess.Popen(
            command,
            env=env,
            stdout=self._log,
            stderr=self._log,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def processor_s(self, name: str) -> float:
        """The processor time of a worker and the processes of its pool so far."""
        main = psutil.Process(self._processes[name].pid)
        times = [process.cpu_times() for process in (main, *main.children())]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        for process in self._processes.values():
            # With the processes of its pool. It has nothing left to do, and would take seconds.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def log_tail(self) -> str:
        """The end of their output, for an error message."""
        return Path(self._log.name).read_text(errors="replace")[-2000:]


@contextmanager
def workers(
    contenders: Sequence[str], broker: str, store: str = "", concurrency: int = 1
) -> Iterator[Workers]:
    """``broker`` and ``store`` are the URLs that the contenders are made with."""
    all_of_them = Workers(contenders, broker, store, concurrency)
    try:
        yield all_of_them
    finally:
        all_of_them.stop()


def wait_for(condition: Any, what: str, timeout_s: float, pause_s: float = 0.001) -> None:
    _wait_until(condition, what, timeout_s, pause_s)


def _wait_until(
    condition: Any, what: str, timeout_s: float = START_S, pause_s: float = 0.02
) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} was not there within {timeout_s:g} s")
        time.sleep(pause_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
