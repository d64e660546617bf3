"""Tasks that run until they may end, with their locks in a cluster: settings by environment."""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery

from tests.support.app import make_app

SHARDED = "SHARDED"


def sharded_app(*, broker_url: str, result_backend: str, **conf: Any) -> Celery:
    app = make_app(name="sharded", broker=broker_url, backend=result_backend, **conf)

    @app.task(name="sharded.hold", unique=True, shared=False)
    def hold(number: int) -> int:
        """Runs until ``let_go``."""
        with redis.Redis.from_url(app.conf.broker_url, socket_timeout=150) as client:
            client.set(f"running {number}", 1)
            client.blpop([f"let go of {number}"], timeout=120)
        return number

    return app


def let_go(app: Celery, number: int) -> None:
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.rpush(f"let go of {number}", 1)


def is_running(app: Celery, number: int) -> bool:
    with redis.Redis.from_url(app.conf.broker_url) as client:
        return bool(client.exists(f"running {number}"))


if SHARDED in os.environ:
    app = sharded_app(**json.loads(os.environ[SHARDED]))
