"""What a store can tell of itself to ``celery unique doctor``.

Optional: a store that has no ``diagnose()`` is asked whether it is there, and no more. With one
it returns a :class:`Diagnosis`; it raises StoreUnavailable as every other method does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from .base import Claim, LockStore

#: A key that no call can have. What is recorded there, for moments, tells stores apart.
NO_CALLS_KEY = "0:" + "0" * 64

#: ``error``: locks are wrong or will be. ``warning``: they can be lost. ``note``: good to know.
Level = Literal["error", "warning", "note"]
#: Who can share these locks: the threads of one process, the processes of one machine, or all.
Reach = Literal["process", "machine", "network"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, and what to do about it."""

    check: str  # a word for programs, such as ``eviction``
    level: Level
    message: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    reach: Reach = "network"
    facts: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    #: Of a store on several servers, or on servers that change places: the facts of each.
    servers: dict[str, dict[str, str]] = field(default_factory=dict)


@contextmanager
def marked(store: LockStore, life_ms: int = 30_000) -> Iterator[str]:
    """Keep an id in the store for as long as this lasts, by which others find out that theirs is
    the same store: addresses, which fingerprints are made of, may differ.

    As a lock of a key that no call can have: every store can do that, in one atomic act.
    """
    claim = Claim(uuid4().hex, "celery_unique.doctor", "pw", grace_ms=life_ms)
    acquired = store.acquire(NO_CALLS_KEY, claim)
    if acquired.holder is not None:  # another one does the same, which is as good
        yield acquired.holder.task_id
        return
    try:
        yield claim.task_id
    finally:
        store.give_back(NO_CALLS_KEY, claim.task_id, mark_ms=1)


def marks_in(store: LockStore) -> list[str]:
    """The ids that are kept in the store by ``marked``."""
    record, _ = store.read(NO_CALLS_KEY)
    return sorted(record.tasks)
