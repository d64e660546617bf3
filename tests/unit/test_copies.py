"""When a worker takes it that a message may have been delivered again."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_unique.leases import Leases
from celery_unique.worker.request import UniqueRequestMixin

LEASES = Leases(queue_ms=1, run_ms=1, grace_ms=1, retention_ms=1, visibility_ms=4_000)


def held_for(seconds: float) -> Any:
    return SimpleNamespace(
        delivery_info={},
        unique_consumer=None,
        _unique_acknowledgement=None,
        _unique_received_at=time.monotonic() - seconds,
        _runtime=SimpleNamespace(holding=SimpleNamespace(leases=LEASES)),
    )


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, False), (3.8, True), (4.1, True)])
def test_a_message_held_for_nearly_the_visibility_timeout_may_exist_twice(
    seconds: float, expected: bool
) -> None:
    """Its acknowledgement is on the way while Redis gives it to another worker."""
    assert UniqueRequestMixin._may_exist_twice(held_for(seconds)) is expected


@pytest.mark.parametrize("failed", [True, False])
def test_a_message_whose_acknowledgement_failed_exists_twice(failed: bool) -> None:
    """Celery logs the error, and does not acknowledge it again."""
    request = held_for(1.0)
    request._unique_acknowledgement = SimpleNamespace(failed=failed)

    assert UniqueRequestMixin._may_exist_twice(request) is failed
