"""Tasks for messages that nobody should have sent: settings come from the environment."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

import celery_unique
from tests.support.patience import PATIENT

STORE_URL = "POISONED_STORE_URL"
BROKER_URL = "POISONED_BROKER_URL"


def make_app(broker_url: str, store_url: str, **conf: Any) -> Celery:
    app = Celery("poisoned", set_as_current=False)
    app.conf.update(
        {
            **PATIENT,
            "broker_url": broker_url,
            "result_backend": broker_url,
            "unique_store_url": store_url,
            **conf,
        }
    )
    celery_unique.install(app)

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
    app = make_app(os.environ[BROKER_URL], os.environ[STORE_URL])
