"""Waiting for something to become true, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    *,
    timeout: float = 10.0,
    interval: float = 0.02,
    message: str = "",
    ignoring: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> T:
    """Call ``condition`` until it returns something true, and return that.

    ``ignoring`` names the exceptions that mean "not yet"; any other one is raised at once.
    """
    deadline = time.monotonic() + timeout
    while True:
        seen: object
        try:
            value = condition()
            if value:
                return value
            seen = value
        except ignoring as error:
            seen = error
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"{message or 'the condition did not become true'}: "
                f"waited {timeout:g} s, last saw {seen!r}"
            )
        time.sleep(interval)
