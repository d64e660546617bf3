"""The one message header of this library: what a worker must know of the lock.

The key is computed once, by the caller, and travels here: the worker never
computes it again. Fields of a newer release are carried along untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from .values import value

HEADER = "celery_unique"
VERSION = 1


@value
class LockHeader:
    task_id: str
    key: str
    namespace: str = ""
    store: str = ""  # fingerprint: a worker that uses another store says so
    created_at: int = 0
    window_ms: int = 0
    keep: str = ""
    arguments: str = ""
    #: What became of the call, where it is not "created".
    outcome: str = ""
    #: The delivery whose body published this message: a retry, or a replacement.
    sent_by: str = ""
    # Added by the worker that starts it, for the process that runs the body.
    delivery: str = ""
    token: int = 0
    again: bool = False  # this message may exist twice
    watched: bool = False  # the worker sends the events of this task
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def as_message(self) -> dict[str, Any]:
        packed: dict[str, Any] = {"v": VERSION, **self.unknown}
        for name, attribute in _FIELDS.items():
            value = getattr(self, attribute)
            if value:
                packed[name] = value
        return packed

    @classmethod
    def from_message(cls, packed: object) -> LockHeader | None:
        """The header of a message, or None where it is not one of ours."""
        if not isinstance(packed, Mapping) or not packed.get("id") or not packed.get("key"):
            return None
        known = {attribute: packed[name] for name, attribute in _FIELDS.items() if name in packed}
        unknown = {name: value for name, value in packed.items() if name not in _FIELDS}
        return cls(**known, unknown=unknown)

    def as_published(self) -> LockHeader:
        """Without what only the worker adds: a retry is published again from here."""
        return replace(
            self, sent_by=self.delivery, delivery="", token=0, again=False, watched=False
        )


#: Short names: the header is part of every message.
_FIELDS = {
    "id": "task_id",
    "key": "key",
    "ns": "namespace",
    "store": "store",
    "at": "created_at",
    "window": "window_ms",
    "keep": "keep",
    "args": "arguments",
    "outcome": "outcome",
    "by": "sent_by",
    "delivery": "delivery",
    "token": "token",
    "again": "again",
    "watched": "watched",
}
