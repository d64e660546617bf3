"""What monitors are told of duplicates, and by which switches."""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_unique.config.app_state import state_of
from celery_unique.header import LockHeader
from celery_unique.worker.delivery import sends_events
from celery_unique.worker.lock_client import WorkerLockClient
from celery_unique.worker.monitor_events import ROWS, DuplicateEvents, Duplicates
from tests.support.app import make_app, value_of, working

KEY = f"1:{'ab' * 32}"


def duplicates(number: int, holder_id: str = "holder") -> Duplicates:
    return Duplicates("rebuild", holder_id, KEY, "worker@host", number)


def header(**facts: Any) -> LockHeader:
    known = {"delivery": "worker@host/1/boot/0", "watched": True}
    return LockHeader("holder", KEY, **{**known, **facts})


class Monitor:
    """Hears the events of an app from now on."""

    def __init__(self, app: Celery) -> None:
        self.heard: list[dict[str, Any]] = []
        self._connection = app.connection()
        self._receiver = app.events.Receiver(self._connection, {"*": self.heard.append})
        self._receiver.queue(self._connection.default_channel).declare()

    def duplicates(self) -> list[dict[str, Any]]:
        with contextlib.suppress(socket.timeout):
            self._receiver.capture(limit=None, timeout=0.3, wakeup=False)
        return [event for event in self.heard if event["type"] == "task-duplicate"]


@pytest.fixture
def make_shop() -> Callable[..., Celery]:
    def make(**conf: Any) -> Celery:
        # The events of all apps of this process would meet in one exchange.
        app = make_app("memory://", event_exchange=f"events-{uuid.uuid4().hex}", **conf)

        @app.task(name="rebuild", unique=True, shared=False)
        def rebuild(shop_id: int) -> int:
            return shop_id

        @app.task(name="secret", unique=True, send_events=False, shared=False)
        def secret(shop_id: int) -> int:
            return shop_id

        return app

    return make


def run_with_duplicates(app: Celery, task: str, number: int) -> Any:
    first = app.tasks[task].delay(7)
    for _ in range(number):
        app.tasks[task].delay(7)
    with working(app):
        value_of(first)
    return first


def test_every_duplicate_has_a_row_up_to_the_limit():
    for number, rows in ((0, 0), (1, 1), (ROWS, ROWS), (ROWS + 1, ROWS + 1), (9999, ROWS + 1)):
        assert len(list(duplicates(number).rows())) == rows

    *shown, last = duplicates(9999).rows()
    assert {row["result"] for row in shown} == {
        "not published: task holder held its key 1:abababababab"
    }
    assert last["result"].startswith(f"and {9999 - ROWS} more not published")


def test_the_limit_of_rows_is_a_setting():
    app = make_app("memory://", unique_monitor_rows=0)

    assert state_of(app).part(WorkerLockClient).events.most_rows == 0
    [row] = Duplicates("rebuild", "holder", KEY, "worker@host", 7, most_rows=0).rows()
    assert row["result"].startswith("and 7 more not published")


def test_an_end_that_is_told_twice_makes_the_same_rows():
    first = [row["uuid"] for row in duplicates(30).rows()]

    assert [row["uuid"] for row in duplicates(30).rows()] == first
    assert len(set(first)) == len(first)
    assert set(first).isdisjoint(row["uuid"] for row in duplicates(30, "other").rows())


def test_a_worker_that_sends_task_events_tells_of_duplicates(make_shop):
    app = make_shop(worker_send_task_events=True)
    monitor = Monitor(app)

    first = run_with_duplicates(app, "rebuild", 2)

    heard = monitor.duplicates()
    assert [(event["name"], event["parent_id"]) for event in heard] == [("rebuild", first.id)] * 2
    started = [event for event in monitor.heard if event["type"] == "task-started"]
    assert {event["hostname"] for event in heard} == {started[0]["hostname"]}
    assert started[0]["result"] == f"unique, key {first.unique_key[:14]}"


@pytest.mark.parametrize(
    ("task", "conf"),
    [
        ("rebuild", {"worker_send_task_events": False}),
        ("secret", {"worker_send_task_events": True}),
    ],
)
def test_celerys_switches_for_events_hold_for_duplicates(make_shop, task, conf):
    app = make_shop(**conf)
    monitor = Monitor(app)

    run_with_duplicates(app, task, 2)

    assert monitor.duplicates() == []


def test_events_are_watched_by_group(make_shop):
    app = make_shop()
    task, secret = app.tasks["rebuild"], app.tasks["secret"]
    with app.connection() as connection:
        every = app.events.Dispatcher(connection)
        workers = app.events.Dispatcher(connection, groups=["worker"])
        none = app.events.Dispatcher(connection, enabled=False)

        assert sends_events(every, task)
        assert not sends_events(every, secret)
        assert not sends_events(workers, task)
        workers.groups.add("task")  # as the remote control command enable_events does
        assert sends_events(workers, task)
        assert not sends_events(none, task)
        assert not sends_events(None, task)


def test_nothing_is_sent_for_a_task_that_nobody_watches_or_that_had_no_duplicate(make_shop):
    app = make_shop()
    monitor, events = Monitor(app), DuplicateEvents(app)

    events.send(header(watched=False), "rebuild", 3)
    events.send(header(), "rebuild", 0)
    events.flush()

    assert monitor.duplicates() == []


def test_rows_that_cannot_be_sent_are_told_in_the_log_and_hold_nothing_up(make_shop, caplog):
    app = make_shop()
    events = DuplicateEvents(app)
    dispatcher = app.events.default_dispatcher

    def broken(**_: Any) -> Any:
        raise OSError("no broker")

    app.events.default_dispatcher = broken
    with caplog.at_level(logging.WARNING, "celery_unique"):
        events.send(header(), "rebuild", 3)
        events.flush(10)
    app.events.default_dispatcher = dispatcher

    assert "monitors miss the 3 duplicates of task holder: no broker" in caplog.text
    monitor = Monitor(app)
    events.send(header(), "rebuild", 1)
    events.flush(10)
    assert len(monitor.duplicates()) == 1


def test_a_sent_event_shows_that_the_task_is_unique(make_shop):
    app = make_shop(task_send_sent_event=True)
    monitor = Monitor(app)

    result = app.tasks["rebuild"].delay(7)

    monitor.duplicates()
    [sent] = monitor.heard
    assert (sent["type"], sent["uuid"]) == ("task-sent", result.id)
    assert sent["result"] == f"unique, key {result.unique_key[:14]}"


def test_a_sent_event_shows_a_call_that_is_parked(make_shop):
    app = make_shop(task_send_sent_event=True)
    monitor = Monitor(app)

    results = [app.tasks["rebuild"].apply_async((7,), unique_on_conflict="queue") for _ in "abc"]

    assert [result.outcome for result in results] == ["created", "queued", "queued"]
    monitor.duplicates()
    assert [(sent["type"], sent["uuid"]) for sent in monitor.heard] == [
        ("task-sent", result.id) for result in results
    ]
    last = monitor.heard[-1]
    assert (last["name"], last["args"], last["kwargs"]) == ("rebuild", "[7]", "{}")
    assert last["result"] == f"unique, key {results[0].unique_key[:14]}, parked at position 2"


def test_a_parked_call_does_not_depend_on_its_event(make_shop, monkeypatch, caplog):
    app = make_shop(task_send_sent_event=True)
    first = app.tasks["rebuild"].apply_async((7,), unique_on_conflict="queue")

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("no broker")

    monkeypatch.setattr(type(app.amqp._event_dispatcher), "publish", refuse)
    second = app.tasks["rebuild"].apply_async((7,), unique_on_conflict="queue")

    assert (first.outcome, second.outcome) == ("created", "queued")
    assert f"monitors miss parked rebuild[{second.id}]: no broker" in caplog.text
