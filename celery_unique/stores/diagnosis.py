"""What a store reports about itself to ``celery unique doctor``.

Optional: a store without ``diagnose()`` is only pinged. With one it returns a :class:`Diagnosis`;
it raises StoreUnavailable as every other method does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from .base import Claim, LockStore

#: A key that no call can have.
NO_CALLS_KEY = "0:" + "0" * 64
#: Where the identity of a store is, whatever the namespaces of its locks are.
IDENTITY_NAMESPACE = "celery_unique.identity"
#: A hundred years: every record of a store has a deadline.
IDENTITY_MS = 100 * 365 * 86_400_000

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


def identity_in(store: LockStore) -> str:
    """The id that the store keeps, by which processes find out that they use the same one: the
    addresses in fingerprints may differ.

    ``store`` is opened in ``IDENTITY_NAMESPACE``, where no walk over locks finds it. The id is that
    of a lock whose key no call can have: every store can keep it, and one atomic act makes it.
    """
    record, _ = store.read(NO_CALLS_KEY)
    if record.tasks:
        return min(record.tasks)
    claim = Claim(uuid4().hex, "celery_unique.identity", "pw", grace_ms=IDENTITY_MS)
    holder = store.acquire(NO_CALLS_KEY, claim).holder
    return claim.task_id if holder is None else holder.task_id
