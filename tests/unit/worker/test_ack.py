"""What waits until the broker has heard that a message is acknowledged."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Message

from celery_unique.worker.ack import Acknowledgement


class Channel:
    """Notes what a broker would hear, or cannot be reached."""

    no_ack_consumers = None

    def __init__(self, told: list[str], *, reachable: bool = True) -> None:
        self._told = told
        self._reachable = reachable

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._tell("ack")

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._tell("reject")

    def _tell(self, what: str) -> None:
        if not self._reachable:
            raise ConnectionResetError
        self._told.append(what)


@pytest.fixture
def told() -> list[str]:
    return []


def message_of(channel: Any) -> Message:
    return Message(body="", delivery_tag="1", channel=channel)


@pytest.mark.parametrize("how", ["ack", "reject"])
def test_it_waits_until_the_message_is_acknowledged_or_rejected(how, told):
    message = message_of(Channel(told))
    acknowledgement = Acknowledgement(message)
    acknowledgement.then(lambda: told.append("settle"))
    assert told == []

    getattr(message, how)()

    assert told == [how, "settle"]
    assert not acknowledgement.failed


def test_it_does_not_wait_for_what_is_over(told):
    message = message_of(Channel(told))
    acknowledgement = Acknowledgement(message)
    message.ack()

    acknowledgement.then(lambda: told.append("settle"))

    assert told == ["ack", "settle"]


def test_it_goes_on_and_says_so_if_the_acknowledgement_fails(told):
    message = message_of(Channel(told, reachable=False))
    acknowledgement = Acknowledgement(message)
    acknowledgement.then(lambda: told.append(f"settle, failed: {acknowledgement.failed}"))

    with pytest.raises(ConnectionResetError):
        message.ack()

    assert told == ["settle, failed: True"]


def test_the_message_is_as_it_was_afterwards(told):
    """No cycle is left that would keep it from being freed."""
    message = message_of(Channel(told))
    Acknowledgement(message)
    message.ack()

    with pytest.raises(Message.MessageStateError):
        message.ack()
    assert not {"ack", "reject"} & set(vars(message))
