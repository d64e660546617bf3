"""pytest-celery's worker app with the library installed. pytest-celery fills in ``imports`` and
``config``, and copies this file into the worker's container."""

from __future__ import annotations

import json

from celery import Celery

import celery_unique

imports = None

app = Celery("celery_test_app")
config = None

if config:
    app.config_from_object(config)
    print(f"Changed worker configuration: {json.dumps(config, indent=4)}")

# Not a test of time-outs: a busy machine may take longer than a quarter of a second.
celery_unique.install(app, gate_timeout=5)

if __name__ == "__main__":
    app.start()
