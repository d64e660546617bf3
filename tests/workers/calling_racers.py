"""Racers that call a task, for the harness that races stores."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_unique.config.app_state import state_of
from tests.stores.racing import Attempt, Round
from tests.support.app import make_app, take_messages
from tests.workers.apps.shop import make_shop


class Called(NamedTuple):
    """The answer to a call, and the ids under which its process has published for it."""

    attempt: Attempt
    published: list[str]


def delay_racer(url: str, process: int) -> Round:
    """In every round all processes call the task with the same arguments, through ``delay``."""
    app = make_app(url, unique_store_timeout=30)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(-1 - process)  # connected, and everything is imported
    state_of(app).store.ping()
    take_messages(app)

    def play(number: int) -> Any:
        result = rebuild.delay(number)
        published = [sent.id for sent in take_messages(app)]
        return Called(Attempt(result.outcome == "created", result.id), published)

    return play


def publish_racer(conf: dict[str, Any], process: int) -> Round:
    """As ``delay_racer``, five calls in a round, with messages that a worker can reach."""
    app = make_shop(**conf)
    state_of(app).store.ping()

    def play(number: int) -> list[str]:
        return [app.tasks["shop.count"].delay(number).id for _ in range(5)]

    return play
