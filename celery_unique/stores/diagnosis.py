"""What a store can tell of itself to ``celery unique doctor``.

Optional: a store that has no ``diagnose()`` is asked whether it is there, and no more. With one
it returns a :class:`Diagnosis`; it raises StoreUnavailable as every other method does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
