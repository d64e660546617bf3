"""Calls for the tests of keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from celery_unique.keys.call import Call
from celery_unique.keys.identity import canonical_text, identity
from celery_unique.policy.policy import UniquePolicy

DEFAULT = UniquePolicy()


def one(x): ...


def call_of(function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Call:
    """A call of shop.task by a sender that has its code, or, without a function, has not."""
    signature = None if function is None else inspect.signature(function)
    return Call("shop.task", args, kwargs, signature)


def text_of(
    function: Callable[..., Any] | None,
    *args: Any,
    policy: UniquePolicy = DEFAULT,
    **kwargs: Any,
) -> str:
    return canonical_text(identity(call_of(function, *args, **kwargs), policy))


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value
