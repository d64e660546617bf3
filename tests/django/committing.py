"""Callers that commit and roll back, at the same time: called inside the project."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any

from tests.django.people import empty_store, store

CALLERS = 8
SHOPS = 300


def commit_and_roll_back(seed: int, transactions: int, method: str) -> dict[str, Any]:
    """Every caller calls in transactions; what came of each of them, and what is in the broker."""
    from celery_unique.reporting import unique_acquired, unique_conflict
    from tests.django.shop.celery import app

    empty_store()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("celery")
    own = threading.local()
    acquired: dict[int, str] = {}
    conflicts: dict[int, str] = {}

    def hear_acquired(task_id: str, **_: Any) -> None:
        acquired[own.transaction] = task_id

    def hear_conflict(task_id: str, **_: Any) -> None:
        conflicts[own.transaction] = task_id

    unique_acquired.connect(hear_acquired)
    unique_conflict.connect(hear_conflict)
    committed: set[int] = set()
    callers = [
        threading.Thread(
            target=_call,
            args=(own, range(number, transactions, CALLERS), seed + number, method, committed),
        )
        for number in range(CALLERS)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    unique_acquired.disconnect(hear_acquired)
    unique_conflict.disconnect(hear_conflict)
    return {
        "committed": committed,
        "acquired": acquired,
        "conflicts": conflicts,
        "messages": _messages(app),
        "locks": [task_id for _, record in store().walk() for task_id in record.tasks],
        "rows": _rows(),
    }


def _call(
    own: threading.local, numbers: range, seed: int, method: str, committed: set[int]
) -> None:
    from django.contrib.auth.models import Group
    from django.db import connection, transaction

    from tests.django.shop.tasks import confirm_order

    chance = random.Random(seed)
    call = getattr(confirm_order, method)
    try:
        for number in numbers:
            own.transaction = number
            keeps = chance.random() < 0.6
            try:
                with transaction.atomic():
                    Group.objects.create(name=f"order {number}")
                    call(chance.randrange(SHOPS), number)
                    if not keeps:
                        raise _RolledBack
            except _RolledBack:
                continue
            committed.add(number)
    finally:
        connection.close()


class _RolledBack(Exception):
    pass


def _messages(app: Any) -> dict[str, int]:
    """The id of every message that waits, with the transaction that published it."""
    found = Counter[str]()
    published = {}
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            (_, transaction), _, _ = json.loads(message.body)
            found[message.headers["id"]] += 1
            published[message.headers["id"]] = transaction
    assert set(found.values()) <= {1}, "a message was published twice"
    return published


def _rows() -> int:
    from django.contrib.auth.models import Group

    number = Group.objects.filter(name__startswith="order ").count()
    Group.objects.filter(name__startswith="order ").delete()
    return int(number)
