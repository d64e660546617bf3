"""``delay_on_commit`` in many transactions at once, on PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.django.committing import CALLERS
from tests.django.inside import DjangoProcess

TRANSACTIONS = 1000


def commit_and_roll_back(process: DjangoProcess, method: str, transactions: int) -> dict[str, Any]:
    answer: dict[str, Any] = process.call(
        "tests.django.committing",
        "commit_and_roll_back",
        seed=7,
        transactions=transactions,
        method=method,
    )
    return answer


def left_by_the_rolled_back(saw: dict[str, Any]) -> list[int]:
    """The transaction of every message, lock and duplicate that should not be."""
    came = [*saw["messages"].values(), *saw["acquired"], *saw["conflicts"]]
    return [number for number in came if number not in saw["committed"]]


@pytest.mark.slow
def test_a_transaction_that_is_rolled_back_leaves_neither_lock_nor_message(django_process, report):
    saw = commit_and_roll_back(django_process, "delay_on_commit", TRANSACTIONS)

    committed, messages = saw["committed"], saw["messages"]
    replies = {**saw["acquired"], **saw["conflicts"]}
    of_rolled_back = left_by_the_rolled_back(saw)
    orphans = [holder for holder in saw["conflicts"].values() if holder not in messages]
    report(
        f"delay_on_commit: {TRANSACTIONS} transactions of {CALLERS} callers, "
        f"{TRANSACTIONS - len(committed)} rolled back; {len(saw['acquired'])} locks, "
        f"{len(messages)} messages, {len(saw['conflicts'])} duplicates; "
        f"{len(of_rolled_back)} locks or messages of a rolled-back one, "
        f"{len(orphans)} duplicates of a holder that never came to be"
    )
    assert saw["rows"] == len(committed)
    assert 0 < len(committed) < TRANSACTIONS
    assert of_rolled_back == []
    assert orphans == []
    assert set(replies) == committed, (
        "every committed call was admitted, or its reply named the holder"
    )
    assert set(messages) == set(saw["acquired"].values()) == set(saw["locks"])
    assert {messages[i] for i in messages} == set(saw["acquired"])
    assert len(saw["conflicts"]) > 100


def test_a_call_that_does_not_wait_for_the_commit_is_caught(django_process):
    saw = commit_and_roll_back(django_process, "delay", 100)

    assert left_by_the_rolled_back(saw) != []
