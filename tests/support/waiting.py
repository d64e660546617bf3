"""Waiting for something to become true, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    *,
    timeout: float = 20.0,
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


def quickest(
    measure: Callable[[], Sequence[float]], *, below: Sequence[float], attempts: int = 4
) -> list[float]:
    """The seconds that steps take, of each the fewest of some attempts; the first one that is
    below all the given bounds ends it.

    For bounds that tell a wait from none. A wait that is in the code is there every time; what a
    busy machine adds is not.
    """
    fewest = list(measure())
    for _ in range(attempts - 1):
        if all(took < bound for took, bound in zip(fewest, below, strict=True)):
            break
        fewest = [min(pair) for pair in zip(fewest, measure(), strict=True)]
    return fewest
