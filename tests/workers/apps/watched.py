"""Tasks that wait for a sign, fail and are replaced, for tests that look on from outside.

Settings come from the environment: ``WATCHED_REDIS`` is the broker, the result backend and the
lock store; ``WATCHED_METRICS`` is the port of the worker's metrics.
"""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery

import celery_unique
from celery_unique.contrib import prometheus
from tests.support.app import make_app


def watched_app(redis_url: str, **conf: Any) -> Celery:
    urls = {"broker": redis_url, "backend": redis_url}
    app = make_app(name="shop", **urls, result_extended=True, **conf)
    signs = redis.Redis.from_url(redis_url, socket_timeout=None)  # bodies wait for long

    def wait_for_sign(name: str) -> None:
        if signs.blpop([f"sign {name}"], timeout=60) is None:
            raise TimeoutError(f"no sign for {name}")

    @app.task(name="shop.rebuild_index", unique=True, shared=False)
    def rebuild_index(shop_id: str) -> str:
        wait_for_sign(shop_id)
        signs.incr("ran shop.rebuild_index")
        return f"index of {shop_id}"

    @app.task(name="shop.charge_card", unique=True, shared=False)
    def charge_card(order_id: str) -> None:
        wait_for_sign(order_id)
        signs.incr("ran shop.charge_card")
        raise ValueError("the card was refused")

    @app.task(name="shop.send_digest", unique=True, unique_on=["user"], shared=False)
    def send_digest(user: str, text: str) -> str:
        signs.incr("ran shop.send_digest")
        return text

    @app.task(name="shop.call_others", shared=False)
    def call_others(number: int, times: int) -> list[str]:
        """Calls made in a worker, at the sign ``calls``: each argument ``times`` times."""
        wait_for_sign("calls")
        return [
            rebuild_index.delay(f"called {number} {argument}").outcome
            for argument in range(2)
            for _ in range(times)
        ]

    @app.task(name="shop.call", shared=False)
    def call(name: str, args: list[Any], options: dict[str, Any]) -> str:
        """A call made in a worker: what became of it, or the error that it raised."""
        try:
            outcome: str = app.tasks[name].apply_async(args, **options).outcome
        except celery_unique.CeleryUniqueError as error:
            return type(error).__name__
        return outcome

    app.signs = signs
    return app


def sign(app: Celery, name: str, number: int = 1) -> None:
    """Let as many bodies go on that wait for this sign."""
    app.signs.rpush(f"sign {name}", *["go"] * number)


if "WATCHED_REDIS" in os.environ:
    app = watched_app(os.environ["WATCHED_REDIS"], **json.loads(os.environ.get("WATCHED", "{}")))
    if "WATCHED_METRICS" in os.environ:
        prometheus.install(app, port=int(os.environ["WATCHED_METRICS"]))
