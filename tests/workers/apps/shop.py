"""A small shop, for tests that need no special tasks: settings come from the environment."""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery

import celery_unique
from tests.support.patience import PATIENT


def make_shop(**conf: Any) -> Celery:
    """The same app for the worker and for its callers."""
    app = Celery("shop", set_as_current=False)
    app.conf.update({**PATIENT, **conf})
    celery_unique.install(app)

    @app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int, full: bool = False) -> int:
        return shop_id

    @app.task(name="shop.plain", shared=False)
    def plain(shop_id: int) -> int:
        return shop_id

    @app.task(name="shop.fail", unique=True, shared=False, throws=(ValueError,))
    def fail(shop_id: int) -> None:
        raise ValueError(shop_id)

    @app.task(name="shop.count", unique=True, shared=False)
    def count(shop_id: int) -> int:
        """How often this task has run with this argument."""
        with redis.Redis.from_url(app.conf.broker_url) as client:
            return int(client.incr(f"runs of {shop_id}"))

    @app.task(name="shop.look", unique=True, shared=False)
    def look(value: Any) -> str:
        return type(value).__name__

    @app.task(name="shop.change", unique=True, shared=False)
    def change(order: dict[str, Any]) -> None:
        order.clear()
        order["changed"] = True

    return app


def runs(app: Celery, shop_id: int) -> int:
    with redis.Redis.from_url(app.conf.broker_url) as client:
        return int(client.get(f"runs of {shop_id}") or 0)


if "SHOP" in os.environ:
    app = make_shop(**json.loads(os.environ["SHOP"]))
