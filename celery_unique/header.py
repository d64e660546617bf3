"""The message header of this library: the lock, for the worker.

The caller computes the key once; the worker never computes it again. Fields of a newer release
are passed on unchanged.

Messages may come from other releases and other programs. ``read`` checks every field that this
release uses: none of another type or size gets past it.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

HEADER = "celery_unique"
VERSION = 1


def _machine() -> str:
    """Where process ids mean the same: this start of this machine, and this namespace of ids (a
    container has its own). Empty where that is not known."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = Path("/proc/self/ns/pid").readlink()
        return f"{zlib.crc32(f'{boot_id}{namespace}'.encode()):08x}"
    except OSError:  # not Linux
        return ""


_MACHINE = _machine()
#: Differs between two lives of a process with the same worker name and process id.
BOOT = f"{time.time_ns():x}.{_MACHINE}"
_counter = itertools.count()


class DeliveryName(NamedTuple):
    """The name of one delivery of a message: ``worker/process/boot/number``."""

    worker: str
    process: str = ""  # the worker's main process
    boot: str = ""
    number: str = ""

    @classmethod
    def new(cls, worker: str | None) -> DeliveryName:
        name = worker or socket.gethostname()
        return cls(name, str(os.getpid()), BOOT, str(next(_counter)))

    @classmethod
    def parse(cls, name: str) -> DeliveryName:
        """Of any text: a worker's name may contain a slash, and other programs write records."""
        return cls(*name.rsplit("/", 3))

    def has_died(self) -> bool:
        """Whether its worker has certainly ended: it ran on this machine, and its process is gone.
        The processes of its pool are then killed by the kernel (Celery asks for that)."""
        machine = self.boot.partition(".")[2]
        if not machine or machine != _MACHINE or not self.process.isdecimal():
            return False
        process = int(self.process)
        if process == os.getpid():
            return self.boot != BOOT
        try:
            stat = Path(f"/proc/{process}/stat").read_text(encoding="latin-1")
        except FileNotFoundError:  # or hidden: a process of another user (hidepid, ProtectProc)
            return not _exists(process)
        except OSError:  # gone while it was read, or not to be read: seen the next time
            return False
        return stat.rpartition(")")[2].split()[0] in ("Z", "X")  # ended, and not reaped yet

    def __str__(self) -> str:
        return "/".join(self)


def _exists(process: int) -> bool:
    """Whether this namespace has the process, by a signal that is only checked, and not sent."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


@dataclass(slots=True)
class LockHeader:
    """The lock of one message."""

    task_id: str
    key: str
    namespace: str = ""
    store: str = ""  # fingerprint: a worker that uses another store reports it
    created_at: int = 0
    window_ms: int = 0
    keep: str = ""
    arguments: str = ""
    #: The outcome of the call, where it is not "created".
    outcome: str = ""
    #: The delivery whose body published this message: a retry, or a replacement.
    sent_by: str = ""
    #: Another message of this id may exist: a publish without a reply was repeated.
    copies: bool = False
    #: Made by a worker, of a task without a key: it guards the deliveries of this id alone.
    guard: bool = False
    #: Values of other calls may be merged into this task: the store has them.
    merge: bool = False
    # Added by the worker that starts it, for the process that runs the body.
    delivery: str = ""
    token: int = 0
    again: bool = False  # this message may exist twice
    watched: bool = False  # the worker sends the events of this task
    payload: str = ""  # the values of all merged calls, see ``stores.record_payloads``
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def leaves_mark(self) -> bool:
        """Whether its end leaves a done mark: a delivery that comes later is dropped. A guard has
        no other purpose; else it takes the suspicion of a second message."""
        return self.guard or self.again

    def as_message(self) -> dict[str, Any]:
        packed: dict[str, Any] = {"v": VERSION, **self.unknown}
        for name, attribute in _FIELDS.items():
            value = getattr(self, attribute)
            if value:
                packed[name] = value
        return packed

    @classmethod
    def from_message(cls, packed: object) -> LockHeader | None:
        """The header of a message, or None where there is none that can be read."""
        return cls.read(packed)[0]

    @classmethod
    def read(cls, packed: object) -> tuple[LockHeader | None, str]:
        """The header of a message, or None and what is wrong with it; nothing is wrong with a
        message that has no header. Raises nothing, whatever the message contains."""
        if packed is None:
            return None, ""
        if not isinstance(packed, Mapping):
            return None, f"it must be a mapping, not {_kind(packed)}"
        for name in ("id", "key"):
            if name not in packed:
                return None, f"{name} is missing"
        header = cls(packed["id"], packed["key"])
        unknown = {}
        for name, value in packed.items():
            check = _CHECKS.get(name)
            if check is None:
                unknown[name] = value
                continue
            is_right, wanted = check
            if not is_right(value):
                return None, f"{name} must be {wanted}, not {_kind(value)}"
            setattr(header, _FIELDS[name], value)
        header.unknown = unknown
        return header, ""

    def receive_as(self, delivery: str) -> None:
        """In a worker that receives the message: set the fields anew that only a worker sets."""
        self.delivery = delivery
        self.token, self.again, self.watched, self.payload = 0, False, False, ""

    def as_published(self) -> LockHeader:
        """Without the fields that only a worker sets, for a retry: a message of its own, of which
        there is no copy."""
        return replace(
            self,
            sent_by=self.delivery,
            copies=False,
            delivery="",
            token=0,
            again=False,
            watched=False,
            payload="",
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
    "copies": "copies",
    "guard": "guard",
    "merge": "merge",
    "delivery": "delivery",
    "token": "token",
    "again": "again",
    "watched": "watched",
    "payload": "payload",
}


#: No store holds more, or shows it: the last millisecond of the year 9999.
_LAST_MS = 253_402_300_799_999
#: A token is the store's clock in microseconds, and grows by one where that stands still.
_LAST_TOKEN = 1000 * _LAST_MS
#: Of every text but the task's id, whose length is the caller's choice.
_LONGEST = {"key": 255, "ns": 100, "keep": 26}
_LONGEST_OTHER = 1000


def _is_text(value: object, longest: int) -> bool:
    """Text that every store can hold: as UTF-8, and without the character NUL."""
    if type(value) is not str or len(value) > longest or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_id(value: object) -> bool:
    """Whether it is a task id that every store can hold."""
    return bool(value) and _is_text(value, sys.maxsize)


def _is_name(longest: int) -> Callable[[object], bool]:
    return lambda value: _is_text(value, longest)


def _is_number(highest: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and 0 <= value <= highest


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _kind(value: object) -> str:
    """The kind of a value, without the value: it may be long, or private."""
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if type(value) is int:
        return f"a number of {value.bit_length()} bits" + (" below zero" if value < 0 else "")
    return "null" if value is None else type(value).__name__


def _checks() -> dict[str, tuple[Callable[[object], bool], str]]:
    checks: dict[str, tuple[Callable[[object], bool], str]] = {
        "id": (is_id, "a text that is not empty"),
        "key": (
            lambda value: bool(value) and _is_text(value, _LONGEST["key"]),
            f"a text of 1 to {_LONGEST['key']} characters",
        ),
        "at": (_is_number(_LAST_MS), "a time in milliseconds"),
        "window": (_is_number(_LAST_MS), "a time in milliseconds"),
        "token": (_is_number(_LAST_TOKEN), "a whole number of microseconds"),
        "copies": (_is_flag, "true or false"),
        "guard": (_is_flag, "true or false"),
        "merge": (_is_flag, "true or false"),
        "payload": (_is_name(sys.maxsize), "a text"),
        "again": (_is_flag, "true or false"),
        "watched": (_is_flag, "true or false"),
    }
    for name in _FIELDS.keys() - checks.keys():
        longest = _LONGEST.get(name, _LONGEST_OTHER)
        checks[name] = (_is_name(longest), f"a text of at most {longest} characters")
    return checks


_CHECKS = _checks()
