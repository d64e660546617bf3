"""Unique tasks for Celery.

The names below are imported when they are first used, so that importing the
package costs next to nothing and loads no store.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import aio as aio
    from .exceptions import BatchInterrupted as BatchInterrupted
    from .exceptions import CeleryUniqueError as CeleryUniqueError
    from .exceptions import ConfigurationError as ConfigurationError
    from .exceptions import DuplicateTask as DuplicateTask
    from .exceptions import IdempotencyKeyConflict as IdempotencyKeyConflict
    from .exceptions import IdempotencyKeyRequired as IdempotencyKeyRequired
    from .exceptions import InvalidPolicy as InvalidPolicy
    from .exceptions import StoreUnavailable as StoreUnavailable
    from .exceptions import UniqueKeyError as UniqueKeyError
    from .exceptions import UnreadableRecord as UnreadableRecord
    from .installation import install as install
    from .installation.task import UniqueTask as UniqueTask
    from .installation.types import UniqueApp as UniqueApp
    from .installation.types import shared_task as shared_task
    from .keys.time_bucket import time_bucket as time_bucket
    from .locks import Lock as Lock
    from .locks import live_locks as live_locks
    from .locks import lookup as lookup
    from .locks import release as release
    from .operations.manifest import manifest as manifest
    from .policy.option_types import CallOptions as CallOptions
    from .policy.option_types import TaskOptions as TaskOptions
    from .policy.policy import UniquePolicy as UniquePolicy
    from .publish.apply_many import apply_many as apply_many
    from .publish.results import UniqueEagerResult as UniqueEagerResult
    from .publish.results import UniqueResult as UniqueResult
    from .reporting import unique_acquired as unique_acquired
    from .reporting import unique_conflict as unique_conflict
    from .reporting import unique_lost as unique_lost
    from .reporting import unique_released as unique_released
    from .reporting import unique_store_error as unique_store_error
    from .reporting import unique_superseded as unique_superseded


__version__ = "0.1.0"

#: Public name -> the module that has it, or that it is.
_HOME = {
    "BatchInterrupted": "exceptions",
    "CallOptions": "policy.option_types",
    "CeleryUniqueError": "exceptions",
    "ConfigurationError": "exceptions",
    "DuplicateTask": "exceptions",
    "IdempotencyKeyConflict": "exceptions",
    "IdempotencyKeyRequired": "exceptions",
    "InvalidPolicy": "exceptions",
    "Lock": "locks",
    "StoreUnavailable": "exceptions",
    "TaskOptions": "policy.option_types",
    "UniqueApp": "installation.types",
    "UniqueEagerResult": "publish.results",
    "UniqueKeyError": "exceptions",
    "UniquePolicy": "policy.policy",
    "UniqueResult": "publish.results",
    "UniqueTask": "installation.task",
    "UnreadableRecord": "exceptions",
    "aio": "aio",
    "apply_many": "publish.apply_many",
    "install": "installation",
    "live_locks": "locks",
    "lookup": "locks",
    "manifest": "operations.manifest",
    "release": "locks",
    "shared_task": "installation.types",
    "time_bucket": "keys.time_bucket",
    "unique_acquired": "reporting",
    "unique_conflict": "reporting",
    "unique_lost": "reporting",
    "unique_released": "reporting",
    "unique_store_error": "reporting",
    "unique_superseded": "reporting",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{_HOME[name]}", __name__)
        return module if _HOME[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)


def _check_django(**facts: Any) -> Any:
    return import_module(".contrib.django.checks", __name__).check_installed_apps(**facts)


# A Django project that imports this library, and does not have its app in INSTALLED_APPS.
if _checks := sys.modules.get("django.core.checks"):
    _checks.register(_check_django, "celery_unique")
