"""A password of Redis is rotated while calls are made and tasks run: no call fails, and none is
lost."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import pytest
import redis

from celery_unique import live_locks
from celery_unique.config.app_state import state_of
from tests.support.app import define, make_app, working
from tests.support.credentials import Passwords
from tests.support.redis import RedisServer
from tests.support.server import HOST
from tests.support.stage import forget_results
from tests.support.waiting import eventually

PROVIDER = f"{Passwords.__module__}.{Passwords.__name__}"
CALLERS = 4
#: How often the password is rotated under load.
ROTATIONS = 2
#: How many tasks wait for a worker at most.
BACKLOG = 100


class Rotated:
    """A Redis server whose user has another password after each rotation."""

    def __init__(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._passwords = iter(("first", "second", "third"))
        self.admin = server.client()
        self.admin.execute_command("ACL", "SETUSER", "shop", "on", "~*", "&*", "+@all")
        self.rotate()
        self.admin.execute_command("ACL", "SETUSER", "default", ">root")  # else nothing works
        self.url = f"redis://{HOST}:{server.port}/0?credential_provider={PROVIDER}"
        #: Of a user whose password stays.
        self.other_url = f"redis://:root@{HOST}:{server.port}/1"

    def rotate(self) -> None:
        old, new = Passwords.password, next(self._passwords)
        self.admin.execute_command("ACL", "SETUSER", "shop", f">{new}")  # both are accepted
        self._monkeypatch.setattr(Passwords, "password", new)
        if old != new:
            self.admin.execute_command("ACL", "SETUSER", "shop", f"<{old}")
            # As where a server ends connections whose token has expired.
            self.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "USER", "shop")

    def refuses(self, password: str) -> bool:
        try:
            self.admin.execute_command("AUTH", "shop", password)
        except redis.RedisError as error:
            return "invalid username-password" in str(error)
        return False


@pytest.fixture
def rotated(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> Rotated:
    return Rotated(start_server(RedisServer), monkeypatch)


def call_meanwhile(task: Any, rotated: Rotated, ran: Counter[str] | None = None) -> list[str]:
    """The ids of calls that are made while the password is rotated; each of them is new.

    The next rotation comes when many were made since the last one, and as many have run.
    """
    outcomes: list[str] = []
    called: list[str] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def call(caller: int) -> None:
        number = 0
        while not stop.is_set():
            if ran is not None and len(called) - len(ran) > BACKLOG:
                stop.wait(0.01)
                continue
            try:
                result = task.delay(f"{caller} {number}")
                called.append(result.id)
                outcomes.append(result.outcome)
            except Exception as error:
                errors.append(error)
            number += 1

    def wait_for_more() -> None:
        made, done = len(outcomes), 0 if ran is None else len(ran)
        eventually(lambda: len(outcomes) > made + 50, timeout=60)
        if ran is not None:
            eventually(lambda: len(ran) > done + 50, timeout=60)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(CALLERS)]
    for each in callers:
        each.start()
    try:
        for _ in range(ROTATIONS):
            wait_for_more()
            rotated.rotate()
        wait_for_more()
    finally:
        stop.set()
        for each in callers:
            each.join()
    assert errors == []
    assert set(outcomes) == {"created"}
    return called


def test_calls_go_on_while_the_password_of_broker_and_store_is_rotated(rotated):
    app = make_app(broker=rotated.url, backend=rotated.url)
    forget_results(app)

    called = call_meanwhile(define(app, unique=True), rotated)

    queued = rotated.admin.lrange(app.conf.task_default_queue, 0, -1)
    published = Counter(json.loads(message)["headers"]["id"] for message in queued)
    assert set(published) == set(called)
    # Celery publishes again where a connection ends between a push and its reply: at most one of
    # each caller each time.
    assert len(queued) - len(published) <= ROTATIONS * CALLERS
    assert rotated.refuses("first")
    state_of(app).store.close()


def test_a_worker_runs_each_task_once_while_the_password_of_its_store_is_rotated(rotated):
    """Not that of its broker: Celery itself loses messages whose connection ends at the wrong
    moment, or waits for the visibility timeout. Nor that of a result backend, to which Celery
    reconnects for many seconds."""
    app = make_app(broker=rotated.other_url, unique_store_url=rotated.url)
    ran: Counter[str] = Counter()

    def rebuild(self: Any, shop_id: str) -> None:
        ran[self.request.id] += 1

    task = define(app, function=rebuild, bind=True, unique=True)
    with working(app):
        called = call_meanwhile(task, rotated, ran)
        eventually(lambda: ran.keys() >= set(called), timeout=60)
        eventually(lambda: not list(live_locks(app)), timeout=60)

    assert ran == Counter(called)
    assert rotated.refuses("first")
    state_of(app).store.close()
