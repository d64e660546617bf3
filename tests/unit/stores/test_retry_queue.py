"""Acts that are carried out when the store answers again."""

from __future__ import annotations

import threading

import pytest

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores import retry_queue as later
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.retry_queue import RetryQueue
from tests.support import eventually


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(later, "LONGEST_PAUSE_S", 0.02)


def test_an_act_is_repeated_until_the_store_answers():
    answers = iter([StoreUnavailable("down"), StoreUnavailable("down"), None])
    done = threading.Event()

    def act() -> None:
        error = next(answers)
        if error is not None:
            raise error
        done.set()

    acts = RetryQueue(MemoryStore())
    acts.retry("k", "give back", act, within_s=10)

    assert done.wait(20)
    eventually(lambda: acts.waiting() == 0)


def test_an_act_is_given_up_after_its_time(caplog):
    def act() -> None:
        raise StoreUnavailable("down")

    acts = RetryQueue(MemoryStore())
    acts.retry("k", "give back", act, within_s=0.05)

    eventually(lambda: acts.waiting() == 0)
    assert "gave up: give back" in caplog.text


def test_what_is_given_up_says_what_follows(caplog):
    acts = RetryQueue(MemoryStore())

    acts.retry("k", "withdraw a call", away, within_s=0.0, otherwise="it may run")

    eventually(lambda: acts.waiting() == 0)
    assert "gave up: withdraw a call (it may run)" in caplog.text


def test_the_first_attempt_is_immediate(monkeypatch):
    monkeypatch.setattr(later, "FIRST_PAUSE_S", 3600.0)
    acts, done = RetryQueue(MemoryStore()), threading.Event()

    acts.retry("k", "withdraw a call", done.set, within_s=10)

    assert done.wait(20)


def test_a_process_that_ends_waits_for_acts_that_are_due(caplog):
    acts, failures = RetryQueue(MemoryStore()), [1, 1]
    done: list[int] = []

    def act() -> None:
        if failures:
            failures.pop()
            raise StoreUnavailable("down")
        done.append(1)

    acts.retry("k", "withdraw a call", act, within_s=60)
    acts.retry("k", "a check", lambda: None, within_s=60, after_s=50, is_check=True)
    acts.retry("k", "much later", lambda: None, within_s=60, after_s=50)
    assert acts.drain(30.0) == 0

    assert done == [1]
    assert acts.waiting() == 2
    assert caplog.text == ""


def test_a_process_that_ends_waits_no_longer_than_its_time(caplog):
    acts = RetryQueue(MemoryStore())
    acts.retry("k", "withdraw a call", away, within_s=60, otherwise="it may run")

    assert acts.drain(0.05) == 1
    acts.report_left(1, 0.05)

    assert "not done when the process ended, after 0.1 s: withdraw a call (it may run)" in (
        caplog.text
    )


def test_an_act_that_fails_otherwise_keeps_no_other_one_waiting(caplog):
    def broken() -> None:
        raise ZeroDivisionError

    done = threading.Event()
    acts = RetryQueue(MemoryStore())
    acts.retry("k", "something broken", broken, within_s=10)
    acts.retry("k", "give back", done.set, within_s=10)

    assert done.wait(20)
    eventually(lambda: acts.waiting() == 0)
    assert "retry failed: something broken" in caplog.text


class Sharded(MemoryStore):
    """The first letter of a key names its part of the store."""

    def shard_of(self, key: str) -> str:
        return key[0]


def away() -> None:
    raise StoreUnavailable("this part is away")


@pytest.mark.parametrize("store", [Sharded, MemoryStore], ids=["another part", "another key"])
def test_what_the_store_does_not_answer_for_keeps_no_other_act_waiting(store):
    done = threading.Event()
    acts = RetryQueue(store())
    acts.retry("a1", "finish that is not answered", away, within_s=60)
    acts.retry("b1", "finish of another key", done.set, within_s=60)

    assert done.wait(20)
    eventually(lambda: acts.waiting() == 1)


def test_acts_on_one_key_stay_in_their_order():
    order: list[str] = []
    failures = iter([True] * 3 + [False] * 10)

    def retry() -> None:
        if next(failures):
            raise StoreUnavailable("down")
        order.append("retry")

    acts = RetryQueue(Sharded())
    acts.retry("a1", "retry", retry, within_s=60)
    acts.retry("a1", "finish", lambda: order.append("finish"), within_s=60)
    acts.retry("b1", "finish of another", lambda: order.append("other"), within_s=60)

    eventually(lambda: acts.waiting() == 0)
    assert order == ["other", "retry", "finish"]


def test_a_record_that_cannot_be_read_is_given_up(caplog):
    def unreadable() -> None:
        raise UnreadableRecord("not JSON")

    acts = RetryQueue(MemoryStore())
    acts.retry("a1", "finish", unreadable, within_s=60)

    eventually(lambda: acts.waiting() == 0)
    assert "gave up: finish" in caplog.text


def test_a_thread_that_was_interrupted_before_it_started_is_started_by_the_next_act():
    """A signal may raise between the two: nothing would ever be tried again."""
    retries = RetryQueue(MemoryStore())
    retries._thread = threading.Thread(target=retries._work)  # made, and never started
    ran = threading.Event()

    retries.retry("key", "a test", ran.set, within_s=30.0)

    assert ran.wait(30.0)
