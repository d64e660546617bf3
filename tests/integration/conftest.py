"""The apps that the tests of this directory run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_unique.config.app_state import state_of
from tests.support.app import make_app

STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("sqlite_url", id="sqlite"),
    pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("valkey_url", id="valkey", marks=pytest.mark.server),
]


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest) -> str:
    """An empty lock store of each kind."""
    if request.param == "memory":
        return "memory://"
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def app(store_url: str) -> Iterator[Celery]:
    """An installed app: broker in memory, locks in each kind of store."""
    app = make_app(store_url)
    yield app
    state_of(app).store.close()


@pytest.fixture
def app_with(store_url: str) -> Iterator[Callable[..., Celery]]:
    """``app_with(unique_conceal_holder=True)``: as ``app``, with settings."""
    apps: list[Celery] = []

    def make(**conf: Any) -> Celery:
        apps.append(make_app(store_url, **conf))
        return apps[-1]

    yield make
    for app in apps:
        state_of(app).store.close()


@pytest.fixture
def local_app() -> Celery:
    """An installed app with its locks in this process, where the store does not matter."""
    return make_app("memory://")


@pytest.fixture
def rebuild(app: Celery) -> Any:
    """A unique task of the app."""

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int, full: bool = False) -> int:
        return shop_id

    return rebuild


@pytest.fixture
def received() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``received(unique_conflict)``: what the signal sends from now on, with its sender."""
    connected: list[tuple[Any, Any]] = []

    def connect(signal: Any, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        facts: list[dict[str, Any]] = []

        def receiver(sender: Any, signal: Any, **sent: Any) -> None:
            every = {"sender": sender, **sent}
            facts.append({name: every[name] for name in every if name not in without})

        signal.connect(receiver)
        connected.append((signal, receiver))
        return facts

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)
