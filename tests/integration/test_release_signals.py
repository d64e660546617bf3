"""Celery's signals as the backstop of the release, with a worker in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state

from celery_unique import unique_lost, unique_released
from celery_unique.config.app_state import state_of
from celery_unique.worker import body, release_signals
from celery_unique.worker.delivery import Delivery, End
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.request import UniqueRequestMixin
from tests.support import RedisServer, eventually
from tests.support.app import locks, make_app, value_of, working

pytestmark = pytest.mark.server


class Reported:
    """What the library has reported, and what it has asked of the store at the ends of tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released: list[str] = []
        self.lost: list[str] = []
        self.finishes = 0
        finish = WorkerLockClient.finish

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.finishes += 1
            return finish(*args, **kwargs)

        monkeypatch.setattr(WorkerLockClient, "finish", counted)
        unique_released.connect(self._on_released)
        unique_lost.connect(self._on_lost)

    def _on_released(self, reason: str, **_: Any) -> None:
        self.released.append(reason)

    def _on_lost(self, reason: str, **_: Any) -> None:
        self.lost.append(reason)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    return Reported(monkeypatch)


@pytest.fixture(params=["memory", "redis"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    url = "memory://"
    if request.param == "redis":
        redis_server: RedisServer = request.getfixturevalue("redis_server")
        url = redis_server.fresh_url()
    app = make_app(url)

    @app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> int:
        return shop_id

    @app.task(name="shop.refuse", unique=True, shared=False)
    def refuse(shop_id: int) -> None:
        raise ValueError(shop_id)

    yield app
    state_of(app).store.close()


@pytest.fixture
def without_body_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the body nor ``task_postrun`` finishes the lock."""
    monkeypatch.setattr(body, "finish", lambda *_: None)
    monkeypatch.setattr(release_signals, "end_without_body", lambda *_: None)


@pytest.fixture
def without_request_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own request announces the revoke."""
    monkeypatch.delattr(UniqueRequestMixin, "_announce_revoked")


@pytest.mark.usefixtures("without_body_release")
def test_task_success_releases_the_key(app: Celery, reported: Reported) -> None:
    with working(app):
        assert value_of(app.tasks["shop.rebuild"].delay(1)) == 1
        eventually(lambda: locks(app) == [], message="the key is still held")

    assert reported.released == ["completed"]
    assert reported.lost == []


@pytest.mark.usefixtures("without_body_release")
def test_task_failure_releases_the_key(app: Celery, reported: Reported) -> None:
    with working(app):
        with pytest.raises(ValueError, match="1"):
            value_of(app.tasks["shop.refuse"].delay(1))
        eventually(lambda: locks(app) == [], message="the key is still held")

    assert reported.released == ["discarded"]
    assert reported.lost == []


@pytest.mark.usefixtures("without_request_release")
def test_task_revoked_releases_the_key(
    app: Celery, reported: Reported, revoke: Callable[[str], None]
) -> None:
    result = app.tasks["shop.rebuild"].delay(1)
    revoke(result.id)

    with working(app):
        eventually(lambda: result.state == "REVOKED")
        eventually(lambda: locks(app) == [], message="the key is still held")

    assert reported.released == ["cancelled"]
    assert reported.lost == []


@pytest.fixture
def revoke() -> Iterator[Callable[[str], None]]:
    """Reaches the worker alone, as from a process without this library."""
    revoked: list[str] = []

    def revoke(task_id: str) -> None:
        revoked.append(task_id)
        worker_state.revoked.add(task_id)

    yield revoke
    for task_id in revoked:
        worker_state.revoked.discard(task_id)


def test_without_a_backstop_the_key_stays_held(
    app: Celery,
    reported: Reported,
    without_body_release: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the tests above show the signals, and nothing else."""
    end_body = Delivery.end_body

    def end_unless_backstop(self: Delivery, end: End, *, backstop: bool = False) -> None:
        if not backstop:
            end_body(self, end)

    monkeypatch.setattr(Delivery, "end_body", end_unless_backstop)

    with working(app):
        assert value_of(app.tasks["shop.rebuild"].delay(1)) == 1

        assert len(locks(app)) == 1
    assert reported.released == []


@pytest.mark.parametrize("ends_by", ["success", "failure", "revoke"])
def test_a_second_release_does_nothing(
    app: Celery, reported: Reported, revoke: Callable[[str], None], ends_by: str
) -> None:
    task = app.tasks["shop.refuse" if ends_by == "failure" else "shop.rebuild"]
    result = task.delay(1)
    if ends_by == "revoke":
        revoke(result.id)

    with working(app):
        eventually(result.ready)
        eventually(lambda: locks(app) == [])

    assert len(reported.released) == 1
    assert reported.lost == []
    assert reported.finishes == 1  # the signals have asked nothing of the store
