"""Acts that are carried out when the store answers again."""

from __future__ import annotations

import threading

import pytest

from celery_unique import later
from celery_unique.exceptions import StoreUnavailable
from celery_unique.later import Later
from tests.kit import eventually


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(later, "LONGEST_PAUSE_S", 0.02)


def test_an_act_is_repeated_until_the_store_answers() -> None:
    answers = iter([StoreUnavailable("down"), StoreUnavailable("down"), None])
    done = threading.Event()

    def act() -> None:
        error = next(answers)
        if error is not None:
            raise error
        done.set()

    acts = Later()
    acts.retry("give back", act, within_s=10)

    assert done.wait(20)
    eventually(lambda: acts.waiting() == 0)


def test_an_act_is_given_up_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    def act() -> None:
        raise StoreUnavailable("down")

    acts = Later()
    acts.retry("give back", act, within_s=0.05)

    eventually(lambda: acts.waiting() == 0)
    assert "gave up: give back" in caplog.text


def test_an_act_that_fails_otherwise_keeps_no_other_one_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    done = threading.Event()
    acts = Later()
    acts.retry("something broken", broken, within_s=10)
    acts.retry("give back", done.set, within_s=10)

    assert done.wait(20)
    eventually(lambda: acts.waiting() == 0)
    assert "could not be carried out: something broken" in caplog.text
