"""A file system that a test can fill."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from pathlib import Path

CHUNK = 4096


class SmallDisk:
    """A tmpfs of limited size, mounted over the directory of a server. Only root can mount it."""

    def __init__(self, megabytes: int) -> None:
        self._megabytes = megabytes
        self._directory: Path | None = None

    @staticmethod
    @functools.cache
    def is_possible() -> bool:
        """Whether this process may mount: root in a container often may not."""
        if os.geteuid() != 0:
            return False
        with tempfile.TemporaryDirectory(prefix="disk-") as place:
            if subprocess.run(_mounting(place, 1), capture_output=True, check=False).returncode:
                return False
            subprocess.run(["umount", place], check=True)
        return True

    def mount(self, directory: Path) -> None:
        subprocess.run(_mounting(str(directory), self._megabytes), check=True)
        self._directory = directory

    def unmount(self) -> None:
        if self._directory is not None:
            # Lazily: a process that is about to end may still have a file open.
            subprocess.run(["umount", "--lazy", str(self._directory)], check=True)
            self._directory = None

    def fill(self) -> None:
        """Take all that is free, to the last page."""
        with self._filler.open("wb") as file:
            free = os.statvfs(self._filler.parent)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
            file.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):
                while os.write(file.fileno(), b"\0" * CHUNK) == CHUNK:
                    pass

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        assert self._directory is not None
        return self._directory / "filler"


def _mounting(place: str, megabytes: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place]
