"""An app that operators look at. What is wrong with it, if anything, is in the environment."""

from __future__ import annotations

import gc
import json
import os
import threading
from typing import Any

from celery import Celery

import celery_unique
from celery_unique.keys import digest as keys
from tests.support.patience import PATIENT

#: ``conf`` for the app; ``installed``: whether it knows the library; ``key_version``.
SETTINGS: dict[str, Any] = json.loads(os.environ["OPERATED_APP"])

if "key_version" in SETTINGS:  # as an older release would make them
    keys.KEY_VERSION = SETTINGS["key_version"]

app = Celery("operated", set_as_current=False)
app.conf.update({**PATIENT, **SETTINGS["conf"]})
if SETTINGS.get("installed", True):
    celery_unique.install(app)


@app.task(name="shop.rebuild_index", unique=True)
def rebuild_index(shop_id: int, full: bool = False) -> None: ...


@app.task(name="shop.send_digest", unique=True, unique_on_conflict="reject")
def send_digest(user_id: int) -> None: ...


@app.task(name="shop.pay")
def pay(amount: int) -> None: ...


@app.task(name="shop.import_all", unique=True, acks_late=True)
def import_all(name: str) -> None:
    threading.Event().wait(120)


@app.task(name="shop.stop_renewing")
def stop_renewing() -> int:
    """As a thread that died: in the process of the worker, so on the threads pool."""
    from celery_unique.worker.renewal import Renewer

    found = [each for each in gc.get_objects() if isinstance(each, Renewer)]
    for renewer in found:
        renewer.stop()
    return len(found)
