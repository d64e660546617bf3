from __future__ import annotations

import pytest

from tests.support import eventually


def test_eventually_returns_the_first_true_value():
    values = iter([None, 0, "found"])

    assert eventually(lambda: next(values), interval=0) == "found"


def test_eventually_says_what_it_waited_for_and_what_it_saw_last():
    with pytest.raises(AssertionError, match=r"the queue is empty: waited 0 s, last saw \[\]"):
        eventually(list, timeout=0, message="the queue is empty")


def test_eventually_takes_an_ignored_exception_as_not_yet():
    answers = iter([ConnectionRefusedError(), "pong"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert eventually(ask, interval=0, ignoring=ConnectionError) == "pong"


def test_eventually_raises_any_other_exception_at_once():
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0, ignoring=ConnectionError)
