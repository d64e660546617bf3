"""A call as plain values, the input of every step to its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect

__all__ = ["Call"]


@dataclass(slots=True)
class Call:
    """One call of a task, before its policy is applied."""

    task_name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Of the task's ``run``, without ``self``; None where the caller has no code of the task.
    signature: inspect.Signature | None = None
    #: The queue that the router chose.
    queue: str = ""
    #: The headers that the policy's ``meta_keys`` name, already looked up.
    meta: Mapping[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    #: Id of the task in whose body the call is made.
    run_id: str | None = None
