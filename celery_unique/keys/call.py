"""A publish attempt as plain values, so that what is made of it is a function of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect

__all__ = ["Call"]


@dataclass(slots=True)
class Call:
    """A call as Celery received it, before any decision about it."""

    task_name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Of the task's ``run``, without ``self``; None where the sender has no code of the task.
    signature: inspect.Signature | None = None
    #: The queue that the router chose.
    queue: str = ""
    #: The headers that the policy's ``meta_keys`` name, already looked up.
    meta: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
