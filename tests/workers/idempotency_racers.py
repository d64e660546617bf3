"""Racers that bring the same idempotency key, for the harness that races stores."""

from __future__ import annotations

from typing import NamedTuple

from celery_unique import IdempotencyKeyConflict
from celery_unique.config.app_state import state_of
from tests.stores.racing import Round
from tests.support.app import make_app, take_messages


class Keyed(NamedTuple):
    """A call with the key of its round: with which arguments, and what it was told."""

    amount: int
    outcome: str
    task_id: str  # empty for a conflict
    #: The ids and amounts that its process has published for it.
    published: list[tuple[str, int]]


def keyed_racer(url: str, race: str, sides: int, process: int) -> Round:
    """In every round all processes bring one key, and one of as many arguments as there are
    sides."""
    app = make_app(url, unique_store_timeout=30)

    @app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    pay.apply_async((0,), idempotency_key=f"{race}-warm-{process}")  # connected and imported
    state_of(app).store.ping()
    take_messages(app)
    amount = process % sides

    def play(number: int) -> Keyed:
        try:
            result = pay.apply_async((amount,), idempotency_key=f"{race}-order-{number}")
        except IdempotencyKeyConflict:
            outcome, task_id = "conflict", ""
        else:
            outcome, task_id = result.outcome, result.id
        published = [(sent.id, sent.args[0]) for sent in take_messages(app)]
        return Keyed(amount, outcome, task_id, published)

    return play
