"""docs/howto/migrate.md on what happens while another library and this one are both on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from celery import Celery
from celery_heimdall import HeimdallTask
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton

import celery_unique
from celery_unique.exceptions import UniquePolicyWarning


@pytest.fixture
def app(redis_url: str) -> Any:
    app = Celery("shop", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": redis_url, "default_timeout": 60},
    }
    app.conf.task_ignore_result = True
    celery_unique.install(app)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UniquePolicyWarning)
        yield app
    app.close()


def rebuild(shop_id: int) -> None: ...


def test_a_graceful_duplicate_of_celery_once_has_neither_outcome_nor_id(app):
    task = app.task(base=QueueOnce, once={"graceful": True}, unique=True, shared=False)(rebuild)
    assert task.delay(7).outcome == "created"

    again = task.delay(7)

    assert (again.id, again.state) == (None, "REJECTED")
    assert not hasattr(again, "outcome")
    assert not hasattr(again, "deduplicated")


def test_celery_once_raises_its_own_error_beside_ours(app):
    task = app.task(base=QueueOnce, unique=True, shared=False)(rebuild)
    task.delay(8)  # its connection is one for all apps of a process

    with pytest.raises(AlreadyQueued):
        task.delay(8)


@pytest.mark.parametrize(
    "options",
    [
        {"base": Singleton, "lock_expiry": 60},
        {"base": HeimdallTask, "heimdall": {"unique": True}},
    ],
)
def test_a_duplicate_of_the_others_is_bypassed(app, options):
    task = app.task(unique=True, shared=False, **options)(rebuild)
    first = task.delay(7)

    again = task.delay(7)

    assert (first.outcome, again.outcome, again.id) == ("created", "bypassed", first.id)
