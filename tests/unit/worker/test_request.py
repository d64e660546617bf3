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


class Hanging(Broken):
    """Celery's request, where the acknowledgement does not return."""

    def acknowledge(self) -> None:
        self.settled_before = self.unique_delivery.settled  # type: ignore[attr-defined]
        raise TimeoutError


class Delivery(SimpleNamespace):
    redelivered = False
    settled = False
    #: Its connection was lost while its body ran.
    twice = False

    def may_exist_twice(self) -> bool:
        return self.twice or self.redelivered

    def is_taken_over(self, message: Any) -> bool:
        return False

    def notice_acknowledgement(self, message: Any) -> None: ...

    def acknowledged(self) -> None:
        self.settled = True
        self.settled_as_twice = self.may_exist_twice()


def request_of(celerys: type, **facts: Any) -> Any:
    request_class = type("Request", (UniqueRequestMixin, celerys), {"__init__": lambda self: None})
    request = request_class()
    request._message, request.unique_delivery = None, Delivery(**facts)
    return request


def test_an_acknowledgement_that_raises_is_one_after_which_the_message_may_come_back() -> None:
    """Else its task stays recorded as ending until the lease ends, and the message runs again."""
    request = request_of(Broken)

    with pytest.raises(ConnectionError):
        request.acknowledge()

    assert request.unique_delivery.settled_as_twice


def test_an_end_after_a_lost_connection_is_settled_before_celery_acknowledges() -> None:
    """Celery 5.7 restores the prefetch count in the same call, in a thread of the pool beside the
    event loop, and may not return: the lease of the ended delivery lapsed, and its message ran."""
    request = request_of(Hanging, twice=True)

    with pytest.raises(TimeoutError):
        request.acknowledge()

    assert request.settled_before


def test_an_end_is_not_settled_before_its_message_is_acknowledged() -> None:
    request = request_of(Hanging)

    with pytest.raises(TimeoutError):
        request.acknowledge()

    assert not request.settled_before
