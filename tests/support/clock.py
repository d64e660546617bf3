"""A clock of a server that can be set while the server runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tests.support.server import ServerNotInstalled

LIBRARY = "usr/lib/*/faketime/libfaketime.so.1"
#: The name and the semaphore that libfaketime leaves in here when its process is killed.
SHARED_MEMORY = Path("/dev/shm")


class ServerClock:
    """The wall clock of one server, by libfaketime, which reads a file at every look at the clock.

    The monotonic clock stays as it is. A program that is linked with jemalloc, as Debian's
    redis-server, ends in the constructor of libfaketime; Valkey, PostgreSQL and MariaDB run.
    """

    def __init__(self) -> None:
        found = sorted(Path("/").glob(LIBRARY))
        if not found:
            raise ServerNotInstalled("libfaketime", "apt-get install faketime")
        self._library = found[-1]
        self._directory = Path(tempfile.mkdtemp(prefix="clock-"))
        self._directory.chmod(0o755)  # servers run as users of their own
        self.ahead = 0.0
        self.shift(0)

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def shift(self, seconds: float) -> None:
        """Set it to the machine's clock and that many seconds, in one step."""
        written = self._directory / "new"
        written.write_text(f"{seconds:+.3f}\n")
        written.chmod(0o644)
        written.rename(self._file)
        self.ahead = seconds

    def forget(self, pid: int) -> None:
        """Remove what a killed process left."""
        for path in SHARED_MEMORY.glob(f"*faketime_*_{pid}"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _file(self) -> Path:
        return self._directory / f"offset-{os.getpid()}"
