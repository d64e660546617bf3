"""The request of a unique message, where Celery's own part of it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_unique.worker.request import UniqueRequestMixin


class Broken:
    """Celery's request, on a connection that is lost: the promise of the acknowledgement raises."""

    acknowledged = False

    def acknowledge(self) -> None:
        raise ConnectionError


class Delivery(SimpleNamespace):
    redelivered = False

    def is_taken_over(self, message: Any) -> bool:
        return False

    def notice_acknowledgement(self, message: Any) -> None: ...

    def acknowledged(self) -> None:
        self.settled_as_twice = self.redelivered


def test_an_acknowledgement_that_raises_is_one_after_which_the_message_may_come_back() -> None:
    """Else its task stays recorded as ending until the lease ends, and the message runs again."""
    request_class = type("Request", (UniqueRequestMixin, Broken), {"__init__": lambda self: None})
    request = request_class()
    request._message, request.unique_delivery = None, Delivery()

    with pytest.raises(ConnectionError):
        request.acknowledge()

    assert request.unique_delivery.settled_as_twice
