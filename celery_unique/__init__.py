"""Unique tasks for Celery.

The names below are imported when they are first used, so that importing the
package costs next to nothing and loads no store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import apply_many
    from .conformance import manifest
    from .exceptions import (
        BatchInterrupted,
        CeleryUniqueError,
        ConfigurationError,
        DuplicateTask,
        IdempotencyKeyConflict,
        IdempotencyKeyRequired,
        InvalidPolicy,
        StoreUnavailable,
        UniqueKeyError,
        UnreadableRecord,
    )
    from .installation import install
    from .locks import Lock, lookup, release
    from .policy import UniquePolicy
    from .results import UniqueEagerResult, UniqueResult
    from .signals import (
        unique_acquired,
        unique_conflict,
        unique_lost,
        unique_released,
        unique_store_error,
        unique_superseded,
    )
    from .task import UniqueTask
    from .time_buckets import time_bucket

__version__ = "0.1.0"

__all__ = [
    "BatchInterrupted",
    "CeleryUniqueError",
    "ConfigurationError",
    "DuplicateTask",
    "IdempotencyKeyConflict",
    "IdempotencyKeyRequired",
    "InvalidPolicy",
    "Lock",
    "StoreUnavailable",
    "UniqueEagerResult",
    "UniqueKeyError",
    "UniquePolicy",
    "UniqueResult",
    "UniqueTask",
    "UnreadableRecord",
    "apply_many",
    "install",
    "lookup",
    "manifest",
    "release",
    "time_bucket",
    "unique_acquired",
    "unique_conflict",
    "unique_lost",
    "unique_released",
    "unique_store_error",
    "unique_superseded",
]

_HOME = {
    "BatchInterrupted": "exceptions",
    "CeleryUniqueError": "exceptions",
    "ConfigurationError": "exceptions",
    "DuplicateTask": "exceptions",
    "IdempotencyKeyConflict": "exceptions",
    "IdempotencyKeyRequired": "exceptions",
    "InvalidPolicy": "exceptions",
    "Lock": "locks",
    "StoreUnavailable": "exceptions",
    "UniqueEagerResult": "results",
    "UniqueKeyError": "exceptions",
    "UniquePolicy": "policy",
    "UniqueResult": "results",
    "UniqueTask": "task",
    "UnreadableRecord": "exceptions",
    "apply_many": "batches",
    "install": "installation",
    "lookup": "locks",
    "manifest": "conformance",
    "release": "locks",
    "time_bucket": "time_buckets",
    "unique_acquired": "signals",
    "unique_conflict": "signals",
    "unique_lost": "signals",
    "unique_released": "signals",
    "unique_store_error": "signals",
    "unique_superseded": "signals",
}


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
