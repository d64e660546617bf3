"""Tasks for messages that nobody should have sent: settings come from the environment."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from tests.support.app import make_app

STORE_URL = "POISONED_STORE_URL"
BROKER_URL = "POISONED_BROKER_URL"


def poisoned_app(broker: str, store_url: str, **conf: Any) -> Celery:
    app = make_app(store_url, name="poisoned", broker=broker, backend=broker, **conf)

    @app.task(name="poisoned.run", unique=True, bind=True, shared=False)
    def run(self: Any, number: int, retries: int = 0) -> bool:
        if self.request.retries < retries:
            raise self.retry(countdown=0)
        return self.request.unique is not None

    @app.task(name="poisoned.late", unique=True, bind=True, shared=False, acks_late=True)
    def late(self: Any, number: int) -> bool:
        return self.request.unique is not None

    return app


if BROKER_URL in os.environ:
    app = poisoned_app(os.environ[BROKER_URL], os.environ[STORE_URL])
