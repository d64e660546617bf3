"""The conformance manifest of the Open Job Spec."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from celery import Celery, current_app

import celery_unique
from celery_unique import ConfigurationError, manifest
from celery_unique.config.app_state import state_of
from celery_unique.stores.memory import MemoryStore


def app_of(**settings: Any) -> Celery:
    app = Celery("manifest", broker="amqp://nowhere.invalid", set_as_current=False)
    return celery_unique.install(app, **settings)


def test_it_has_the_form_of_the_specification():
    found = manifest(app_of(store_url="redis://nowhere.invalid:1/0"))

    assert found == {
        "ojs_version": "1.0.0-rc.1",
        "implementation": {
            "name": "celery-unique-tasks",
            "version": celery_unique.__version__,
            "language": "python",
        },
        "conformance_level": 0,
        "capabilities": {
            "unique_jobs": {
                "strength": "strong",
                "mechanism": "one Lua script for each act, run atomically by the Redis server",
            },
            "atomic_publish": {
                "used": False,
                "reason": "the broker is not Redis with kombu's own transport",
            },
        },
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("url", ["memory://", "sqlite://", "redis://", "postgresql+psycopg://"])
def test_strength_and_mechanism_are_those_of_the_configured_store(url):
    address = {"memory://": "", "sqlite://": "//tmp/never-made.sqlite3"}.get(url, "h.invalid/0")
    app = app_of(store_url=url + address)
    store = state_of(app).store

    assert manifest(app)["capabilities"]["unique_jobs"] == {
        "strength": store.guarantee,
        "mechanism": store.mechanism,
    }


def test_a_store_of_somebody_else_is_not_said_to_be_strong():
    class Weak(MemoryStore):
        guarantee = "best-effort"
        mechanism = "hope"

    app = app_of(store_url="memory://")
    state_of(app).use_store(Weak.from_url("memory://"))

    assert manifest(app)["capabilities"]["unique_jobs"] == {
        "strength": "best-effort",
        "mechanism": "hope",
    }


def test_without_a_store_it_says_what_to_set():
    with pytest.raises(ConfigurationError, match="unique_store_url"):
        manifest(app_of())


def test_an_app_that_is_not_installed_is_told_what_to_do():
    app = Celery("plain", broker="memory://", set_as_current=False)

    with pytest.raises(ConfigurationError, match=r"celery_unique\.install"):
        manifest(app)


def test_the_current_app_will_do():
    app = app_of(store_url="memory://")
    app.set_current()
    try:
        assert manifest(current_app) == manifest(app)
    finally:
        from celery import _state

        _state._tls.current_app = None


def test_a_function_is_still_a_function_after_its_module_was_imported():
    """A module of a function's name would take its place in the package."""
    for name in celery_unique.__all__:
        value = getattr(celery_unique, name)
        importlib.import_module(f"celery_unique.{celery_unique._HOME[name]}")

        assert getattr(celery_unique, name) is value, name
