"""Figures from the processes of a pool to the main process of their worker.

Datagrams on a local socket: a process that sends never waits, and what does not fit at the
moment goes with the next figure. The address travels in the environment, so that processes
that are spawned find it as well as those that are forked.
"""

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
#: How many figures one datagram carries at most.
BATCH = 200
#: How many wait for a main process that does not read; older ones are dropped then.
WAITING = 20_000

Figure = tuple[str, list[str], float]


class Relay:
    def __init__(self, count: Callable[[str, list[str], float], None]) -> None:
        self._count = count
        self._mutex = threading.Lock()
        self._waiting: list[Figure] = []
        self._socket: socket.socket | None = None
        self._socket_of = 0  # the process that made it
        self._address = ""  # of this process, where it listens
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        self._mutex = threading.Lock()
        self._waiting = []

    # -- in the main process -------------------------------------------------

    def open(self) -> None:
        """Listen for the processes of the pool that is about to be made."""
        if not self._address.startswith(f"{os.getpid()}:"):
            self._address = self._start_listening()
        os.environ[ADDRESS] = self._address

    def close(self) -> None:
        """The worker is over: what this process starts from now on counts for itself."""
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
            figures: list[Figure] = json.loads(listening.recv(1 << 20))
            for name, labels, amount in figures:
                self._count(name, labels, amount)

    # -- in a process of the pool ----------------------------------------------

    def take(self, name: str, labels: list[str], amount: float) -> bool:
        """Send a figure to the main process. False where this is not a process of a pool."""
        address = os.environ.get(ADDRESS)
        if address is None:
            return False
        owner, _, path = address.partition(":")
        if owner != str(os.getppid()) or owner == str(os.getpid()):
            return False
        with self._mutex:
            self._waiting.append((name, labels, amount))
            del self._waiting[:-WAITING]
            self._send(path)
        return True

    def flush(self, **_: Any) -> None:
        """The process ends: what is still here goes now, or never."""
        path = os.environ.get(ADDRESS, "").partition(":")[2]
        if path and self._waiting:
            with self._mutex:
                self._send(path)

    def _send(self, path: str) -> None:
        # A full queue (BlockingIOError) or no listener: kept for the next time.
        with contextlib.suppress(OSError):
            while self._waiting:
                batch = self._waiting[:BATCH]
                self._sender().sendto(json.dumps(batch).encode(), path)
                del self._waiting[: len(batch)]

    def _sender(self) -> socket.socket:
        if self._socket is None or self._socket_of != os.getpid():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket_of = os.getpid()
        return self._socket


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process that ends
        shutil.rmtree(directory, ignore_errors=True)
