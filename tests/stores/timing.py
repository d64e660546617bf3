"""Stores that give up in time, measured on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_unique.exceptions import StoreUnavailable
from tests.support import eventually, quickest

#: For stores of tests that are not about time-outs. Of the 2 s that are usual a quarter is for
#: connecting, and a healthy server takes longer now and then if it has to share two processors.
PATIENCE_S = 20.0


def unavailable_within(
    seconds: float, act: Callable[[], Any], *, match: str | None = None
) -> StoreUnavailable:
    """The error that ``act`` raises. Where it takes longer, ``act`` is done again: a busy machine
    adds to one attempt, a time-out that is not kept to all."""
    raised: list[StoreUnavailable] = []

    def measure() -> list[float]:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=match) as caught:
            act()
        raised.append(caught.value)
        return [time.monotonic() - began]

    [took] = quickest(measure, below=[seconds])
    assert took < seconds, f"{took:.2f} s"
    return raised[0]


def after_all(act: Callable[[], Any]) -> Any:
    """What ``act`` returns, on a store with a short time-out and a server that is well: there, too,
    a busy machine may make it wait for too long."""
    return eventually(lambda: [act()], ignoring=StoreUnavailable)[0]
