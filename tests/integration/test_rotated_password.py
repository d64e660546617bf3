"""A password of Redis is rotated while calls are made: no call fails, and none is lost."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
import redis

from celery_unique.config.app_state import state_of
from tests.support.app import define, make_app
from tests.support.credentials import Passwords
from tests.support.redis import RedisServer
from tests.support.server import HOST
from tests.support.waiting import eventually

PROVIDER = f"{Passwords.__module__}.{Passwords.__name__}"


def test_calls_go_on_while_the_password_of_broker_and_store_is_rotated(start_server, monkeypatch):
    server = start_server(RedisServer)
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "shop", "on", ">first", "~*", "&*", "+@all")
    admin.execute_command("ACL", "SETUSER", "default", ">root")  # nothing works without one
    broker = f"redis://{HOST}:{server.port}/0?credential_provider={PROVIDER}"
    app = make_app(broker=broker, backend=broker)
    rebuild = define(app, unique=True)
    outcomes: list[str] = []
    called: list[str] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def call(caller: int) -> None:
        number = 0
        while not stop.is_set():
            try:
                result = rebuild.delay(f"{caller} {number}")
                called.append(result.id)
                outcomes.append(result.outcome)
            except Exception as error:
                errors.append(error)
            number += 1

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for each in callers:
        each.start()
    try:
        for old, new in (("first", "second"), ("second", "third")):
            made = len(outcomes)
            eventually(lambda made=made: len(outcomes) > made + 50)
            admin.execute_command("ACL", "SETUSER", "shop", f">{new}")  # both are accepted
            monkeypatch.setattr(Passwords, "password", new)
            admin.execute_command("ACL", "SETUSER", "shop", f"<{old}")
            # As where a server ends connections whose token has expired.
            admin.client_kill_filter(_type="normal", skipme=True)
        made = len(outcomes)
        eventually(lambda: len(outcomes) > made + 50)
    finally:
        stop.set()
        for each in callers:
            each.join()

    assert errors == []
    assert set(outcomes) == {"created"}
    queued = admin.lrange(app.conf.task_default_queue, 0, -1)
    published = Counter(json.loads(message)["headers"]["id"] for message in queued)
    assert set(published) == set(called)
    # Celery publishes again where a connection ends between a push and its reply: at most one of
    # each caller each time.
    assert len(queued) - len(published) <= 2 * len(callers)
    with pytest.raises(redis.RedisError, match="invalid username-password"):
        admin.execute_command("AUTH", "shop", "first")
    state_of(app).store.close()
