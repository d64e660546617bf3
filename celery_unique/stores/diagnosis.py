"""What a store reports about itself to ``celery unique doctor``.

Optional: a store without ``diagnose()`` is only pinged. With one it returns a :class:`Diagnosis`;
it raises StoreUnavailable as every other method does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from .base import Claim, LockStore

#: A key that no call can have. What is briefly recorded there distinguishes stores.
NO_CALLS_KEY = "0:" + "0" * 64

#: ``error``: locks are wrong or will be. ``warning``: they can be lost. ``note``: good to know.
Level = Literal["error", "warning", "note"]
#: What can share these locks: the threads of one process, the processes of one machine, or all.
Reach = Literal["process", "machine", "network"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, and its cure."""

    check: str  # a word for programs, such as ``eviction``
    level: Level
    message: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reach: Reach = "network"
    facts: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    #: Of a store on several servers, or on servers that fail over: the facts of each.
    servers: dict[str, dict[str, str]] = field(default_factory=dict)


@contextmanager
def marked(store: LockStore, life_ms: int = 30_000) -> Iterator[str]:
    """Keep an id in the store, by which other processes find out that they use the same store:
    the addresses in fingerprints may differ.

    It is a lock of a key that no call can have: every store can do that, in one atomic act.
    """
    claim = Claim(uuid4().hex, "celery_unique.doctor", "pw", grace_ms=life_ms)
    acquired = store.acquire(NO_CALLS_KEY, claim)
    if acquired.holder is not None:  # another process does the same, which serves as well
        yield acquired.holder.task_id
        return
    try:
        yield claim.task_id
    finally:
        store.give_back(NO_CALLS_KEY, claim.task_id, mark_ms=1)


def marks_in(store: LockStore) -> list[str]:
    """The ids that ``marked`` keeps in the store."""
    record, _ = store.read(NO_CALLS_KEY)
    return sorted(record.tasks)
