"""The log of a chaos run: what every process did, written before anything can go wrong with it.

Each process appends to a file of its own, one JSON document a line, one system call each, so that
what was written survives SIGKILL. Times are CLOCK_MONOTONIC, which all processes of one machine
share. Nothing of the library under test is involved.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Appends events. Safe over fork, and between threads: one write is one line."""

    def __init__(self, directory: Path | str, role: str) -> None:
        self._directory = Path(directory)
        self._role = role
        self._file = -1
        self._owner = 0

    def note(self, what: str, *, t: float | None = None, **facts: Any) -> None:
        event = {"t": time.monotonic() if t is None else t, "what": what, **facts}
        os.write(self._opened(), (json.dumps(event) + "\n").encode())

    def _opened(self) -> int:
        if self._owner != os.getpid():
            path = self._directory / f"{self._role}-{os.getpid()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._owner = os.getpid()
        return self._file


def read(directory: Path | str) -> list[Event]:
    """Every event of the run, in the order of time. A line that a kill cut short is left out."""
    events: list[Event] = []
    for path in sorted(Path(directory).glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: event["t"])
