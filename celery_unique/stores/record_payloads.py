"""Payloads of the tasks of a key: the values of calls that were merged into them.

A call that is merged leaves one *line*: a JSON array of its id and its values. The lines of a task
are in the order in which the calls were admitted, the task's own call first. They may be many, so
they are stored beside the record, by the id of the task that runs them.

They outlive the record of their task: its lease may lapse while its message still waits in the
broker, and the task then runs with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Protocol

from .record_followers import KEPT_MS as KEPT_MS  # noqa: PLC0414  (as long as followers are)


def line_head(call_id: str) -> str:
    """How the line of a call begins, whatever its values are."""
    return f"[{encode_basestring_ascii(call_id)},"  # as json.dumps would


def line_of(call_id: str, values: str) -> str:
    """``values``: JSON, an object that has a list for each parameter that is merged."""
    return f"{line_head(call_id)}{values}]\n"


def size_of(line: str, head: str) -> int:
    """The length of the values in the line: it is what ``unique_merge_max_bytes`` bounds."""
    return len(line) - len(head) - len("]\n")


def lines_in(payload: str) -> list[str]:
    return payload.splitlines(keepends=True)


class Payloads(Protocol):
    """The payloads of one key, by task id. Those that have lapsed are absent."""

    def size(self, task_id: str) -> int:
        """The length of all values."""

    def text(self, task_id: str) -> str:
        """All lines; empty for none."""

    def append(self, task_id: str, line: str, size: int, until: int) -> None:
        """Add a line, and keep all of them at least until then."""

    def remove(self, task_id: str, head: str) -> bool:
        """Remove the line that begins so; whether there was one."""

    def move(self, task_id: str, other_id: str, until: int) -> None:
        """Append all lines of one task to those of another."""

    def keep(self, task_id: str, until: int) -> None:
        """Keep the lines at least until then."""

    def drop(self, task_id: str) -> None:
        """Delete all lines."""

    def purge(self, now: int) -> None:
        """Treat what has lapsed as absent, and delete it unless the store does so by itself."""

    def latest(self) -> int:
        """The latest deadline, if the record must stay for it; else 0."""


@dataclass(slots=True)
class _Payload:
    lines: list[str] = field(default_factory=list)
    size: int = 0
    until: int = 0


@dataclass(slots=True)
class PayloadsInMemory:
    _tasks: dict[str, _Payload] = field(default_factory=dict)

    def size(self, task_id: str) -> int:
        return self._tasks[task_id].size if task_id in self._tasks else 0

    def text(self, task_id: str) -> str:
        return "".join(self._tasks[task_id].lines) if task_id in self._tasks else ""

    def append(self, task_id: str, line: str, size: int, until: int) -> None:
        payload = self._tasks.setdefault(task_id, _Payload())
        payload.lines.append(line)
        payload.size += size
        payload.until = max(payload.until, until)

    def remove(self, task_id: str, head: str) -> bool:
        payload = self._tasks.get(task_id, _Payload())
        for line in payload.lines:
            if line.startswith(head):
                payload.lines.remove(line)
                payload.size -= size_of(line, head)
                return True
        return False

    def move(self, task_id: str, other_id: str, until: int) -> None:
        payload = self._tasks.pop(task_id, None)
        if payload is not None:
            other = self._tasks.setdefault(other_id, _Payload())
            other.lines += payload.lines
            other.size += payload.size
            other.until = max(other.until, payload.until, until)

    def keep(self, task_id: str, until: int) -> None:
        if task_id in self._tasks:
            self._tasks[task_id].until = max(self._tasks[task_id].until, until)

    def drop(self, task_id: str) -> None:
        self._tasks.pop(task_id, None)

    def purge(self, now: int) -> None:
        for task_id in [i for i, payload in self._tasks.items() if payload.until <= now]:
            del self._tasks[task_id]

    def latest(self) -> int:
        return max((payload.until for payload in self._tasks.values()), default=0)
