"""Sends counts from the processes of a pool to the main process of their worker.

Datagrams on a local socket: the sender never waits, and what the socket does not accept is sent
with the next count. The environment contains the address, for spawned processes as for forked ones.
"""

# Not prometheus_client's multiprocess mode: it must be set in the environment before the first
# import of prometheus_client, and then changes the user's own metrics, which install() must not.

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS = "CELERY_UNIQUE_METRICS_SOCKET"
#: Most counts in one datagram.
BATCH = 200
#: Most counts that wait for a main process that does not read; older ones are dropped.
WAITING = 20_000


class Relay:
    def __init__(self, count: Callable[[str, list[str], float], None]) -> None:
        self._count = count
        self._address = ""  # where this process listens
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: list[tuple[str, list[str], float]] = []
        self._socket: socket.socket | None = None

    # -- in the main process -------------------------------------------------

    def open(self) -> None:
        """Listen for the processes of the pool that is about to be created."""
        if not self._address.startswith(f"{os.getpid()}:"):
            self._address = self._start_listening()
        os.environ[ADDRESS] = self._address

    def close(self) -> None:
        """The worker has finished: processes that start from now on count for themselves."""
        if self._address and os.environ.get(ADDRESS) == self._address:
            del os.environ[ADDRESS]

    def _start_listening(self) -> str:
        directory = Path(tempfile.mkdtemp(prefix="celery-unique-"))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(directory / "metrics"))
        atexit.register(_remove, directory, os.getpid())
        threading.Thread(
            target=self._listen, args=(listening,), name="celery_unique.metrics", daemon=True
        ).start()
        return f"{os.getpid()}:{directory / 'metrics'}"

    def _listen(self, listening: socket.socket) -> None:
        while True:
            for name, labels, amount in json.loads(listening.recv(1 << 20)):
                self._count(name, labels, amount)

    # -- in a process of the pool ----------------------------------------------

    def take(self, name: str, labels: list[str], amount: float) -> bool:
        """Send a count to the main process. False where this is not a process of a pool."""
        owner, _, path = os.environ.get(ADDRESS, "").partition(":")
        if owner != str(os.getppid()) or owner == str(os.getpid()):
            return False
        with self._mutex:
            self._waiting.append((name, labels, amount))
            del self._waiting[:-WAITING]
            self._send(path)
        return True

    def flush(self, **_: Any) -> None:
        """Send what waits: the process ends."""
        path = os.environ.get(ADDRESS, "").partition(":")[2]
        if path and self._waiting:
            with self._mutex:
                self._send(path)

    def _send(self, path: str) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        # A full queue (BlockingIOError) or no listener: kept for the next time.
        with contextlib.suppress(OSError):
            while self._waiting:
                batch = self._waiting[:BATCH]
                self._socket.sendto(json.dumps(batch).encode(), path)
                del self._waiting[: len(batch)]


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process that ends
        shutil.rmtree(directory, ignore_errors=True)
