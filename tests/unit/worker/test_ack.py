"""What waits until the acknowledgement of a message is sent."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Message

from celery_unique.worker.ack import Acknowledgement


class Channel:
    """Records what a broker would receive, or cannot be reached."""

    no_ack_consumers = None

    def __init__(self, sent: list[str], *, reachable: bool = True) -> None:
        self._sent = sent
        self._reachable = reachable

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._send("ack")

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._send("reject")

    def _send(self, what: str) -> None:
        if not self._reachable:
            raise ConnectionResetError
        self._sent.append(what)


@pytest.fixture
def sent() -> list[str]:
    return []


def message_of(channel: Any) -> Message:
    return Message(body="", delivery_tag="1", channel=channel)


@pytest.mark.parametrize("how", ["ack", "reject"])
def test_it_waits_until_the_message_is_acknowledged_or_rejected(how, sent):
    message = message_of(Channel(sent))
    acknowledgement = Acknowledgement(message)
    acknowledgement.then(lambda: sent.append("settle"))
    assert sent == []

    getattr(message, how)()

    assert sent == [how, "settle"]
    assert not acknowledgement.failed


def test_it_does_not_wait_for_what_is_over(sent):
    message = message_of(Channel(sent))
    acknowledgement = Acknowledgement(message)
    message.ack()

    acknowledgement.then(lambda: sent.append("settle"))

    assert sent == ["ack", "settle"]


def test_it_continues_and_reports_that_the_acknowledgement_failed(sent):
    message = message_of(Channel(sent, reachable=False))
    acknowledgement = Acknowledgement(message)
    acknowledgement.then(lambda: sent.append(f"settle, failed: {acknowledgement.failed}"))

    with pytest.raises(ConnectionResetError):
        message.ack()

    assert sent == ["settle, failed: True"]


def test_the_message_is_as_it_was_afterwards(sent):
    """No cycle is left that would keep it from being freed."""
    message = message_of(Channel(sent))
    Acknowledgement(message)
    message.ack()

    with pytest.raises(Message.MessageStateError):
        message.ack()
    assert not {"ack", "reject"} & set(vars(message))
