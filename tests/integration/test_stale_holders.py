"""A duplicate of a holder that has ended, or whose message is lost, releases its key."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, group

from celery_unique import apply_many, lookup, unique_lost
from celery_unique.config.app_state import state_of
from celery_unique.publish.request import address_of
from celery_unique.publish.stale_holders import healing, lost_messages, queues
from celery_unique.publish.stale_holders.lock_view import StoreClock, locks_of
from celery_unique.publish.stale_holders.lost_messages import missing_messages
from celery_unique.publish.stale_holders.queues import NO_HURRY, Limits
from tests.integration.conftest import STORES
from tests.support import RedisServer, eventually
from tests.support.app import (
    advance,
    define,
    flush,
    make_app,
    messages,
    plain_app,
    value_of,
    working,
)

#: As in the settings.
CHECK_AFTER_S = 60


def echo(shop_id: int) -> int:
    return shop_id


def fails(shop_id: int) -> int:
    raise ValueError(shop_id)


@contextmanager
def plain_worker(app: Celery, function: Any = echo) -> Iterator[Celery]:
    """A worker of the same queue without the library."""
    broker, backend = app.conf.broker_url, app.conf.result_backend
    queue = app.conf.task_default_queue
    plain = plain_app(broker=broker, backend=backend, task_default_queue=queue)
    define(plain, function=function)
    with working(plain):
        yield plain


@pytest.fixture(
    params=[
        *STORES,
        pytest.param("mariadb_url", id="mariadb", marks=pytest.mark.server),
        pytest.param("cluster_url", id="cluster", marks=pytest.mark.server),
    ]
)
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """As for the other tests of this directory, on more stores."""
    url = "memory://" if request.param == "memory" else request.getfixturevalue(request.param)
    # The tests of a session share a cluster.
    app = make_app(url, unique_namespace=f"test-{uuid4()}")
    yield app
    state_of(app).store.close()


@pytest.fixture
def lost() -> Iterator[list[dict[str, Any]]]:
    heard: list[dict[str, Any]] = []

    def note(**facts: Any) -> None:
        heard.append(facts)

    unique_lost.connect(note)
    yield heard
    unique_lost.disconnect(note)


def run_unseen(app: Celery) -> None:
    """Run the task that waits, whose end only the caller itself could read."""
    ran = threading.Event()

    def note(shop_id: int) -> None:
        ran.set()

    with plain_worker(app, note):
        assert ran.wait(30)


def run_plainly(app: Celery, result: Any, function: Any = echo) -> None:
    with plain_worker(app, function) as plain:
        plain.AsyncResult(result.id).get(timeout=30, propagate=False, interval=0.01)


# -- the task has ended -----------------------------------------------------------------------


def test_a_task_that_ended_in_a_worker_without_the_library_blocks_no_call_for_long(
    app: Celery, lost: list[dict[str, Any]], caplog: Any
) -> None:
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    flush(app)
    run_plainly(app, first)

    soon = task.delay(7)
    advance(app, CHECK_AFTER_S + 1)
    later = task.delay(7)

    assert (soon.outcome, soon.id) == ("deduplicated", first.id)
    assert later.outcome == "created"
    [fact] = lost
    assert (fact["task_id"], fact["sender"]) == (first.id, "shop.rebuild")
    assert "has ended (SUCCESS in the result backend)" in fact["reason"]
    [line] = [each for each in caplog.records if getattr(each, "outcome", "") == "lost"]
    assert line.levelno == logging.WARNING
    held = lookup(task, (7,))
    assert held is not None
    assert held.task_id == later.id


@pytest.mark.parametrize(
    ("backend", "is_read"),
    [
        ("cache+memory://", True),
        ("file", True),
        ("sqlite", True),
        pytest.param("postgres", True, marks=pytest.mark.server),
        pytest.param("redis", True, marks=pytest.mark.server),
        ("rpc://", False),
    ],
)
def test_the_end_is_read_from_each_kind_of_result_backend(
    request: Any, tmp_path: Path, lost: list[dict[str, Any]], backend: str, is_read: bool
) -> None:
    """Where it cannot be read, and the broker cannot either, the holder keeps its key."""
    if backend in ("file", "sqlite"):
        database = f"db+sqlite:///{tmp_path / 'results.sqlite3'}"
        backend = tmp_path.as_uri() if backend == "file" else database
    elif backend in ("postgres", "redis"):
        url = str(request.getfixturevalue(f"{backend}_server").fresh_url())
        backend = f"db+{url}" if backend == "postgres" else url
    app = make_app("memory://", backend=backend)
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    assert not first.ready()
    run_plainly(app, first) if is_read else run_unseen(app)
    advance(app, CHECK_AFTER_S + 1)

    again = task.delay(7)

    assert (again.outcome == "created", again.deduplicated) == (is_read, not is_read)
    assert ["has ended (SUCCESS" in fact["reason"] for fact in lost] == [True] * is_read


@pytest.mark.parametrize(
    ("function", "options", "outcome"),
    [
        (echo, {"unique_states": "until_success", "unique_for": 7200}, "deduplicated"),
        (fails, {"unique_states": "until_success", "unique_for": 7200}, "created"),
        (fails, {"unique_states": "window", "unique_for": 7200}, "deduplicated"),
        (fails, {}, "created"),
    ],
)
def test_the_end_counts_as_the_policy_says(
    app: Celery, function: Any, options: dict[str, Any], outcome: str
) -> None:
    task = define(app, unique=True, function=function, **options)
    first = task.delay(7)
    flush(app)
    run_plainly(app, first, function)
    advance(app, CHECK_AFTER_S + 1)

    again = task.delay(7)

    assert again.outcome == outcome
    if outcome == "deduplicated":
        assert again.holder_state == ("completed" if function is echo else "discarded")


def test_an_idempotency_key_still_returns_the_ended_task(app: Celery) -> None:
    task = define(app, unique=True, function=echo)
    first = task.apply_async((7,), idempotency_key="order-7")
    flush(app)
    run_plainly(app, first)
    advance(app, CHECK_AFTER_S + 1)

    again = task.apply_async((7,), idempotency_key="order-7")

    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", "completed")


def test_members_of_a_canvas_and_of_a_batch_go_ahead_too(app: Celery) -> None:
    task = define(app, unique=True, function=echo)
    held = [task.delay(shop_id) for shop_id in (7, 8)]
    flush(app)
    with plain_worker(app) as plain:
        for result in held:
            value_of(plain.AsyncResult(result.id))
    advance(app, CHECK_AFTER_S + 1)

    grouped = group(task.s(7)).apply_async()
    [batched] = apply_many([task.s(8)])

    assert batched.outcome == "created"
    assert {sent.id for sent in messages(app)} == {grouped.results[0].id, batched.id}


# -- a task that waits ------------------------------------------------------------------------


def test_a_task_that_waits_for_an_hour_is_never_released(
    app: Celery, lost: list[dict[str, Any]]
) -> None:
    task = define(app, unique=True, function=echo)
    held = apply_many([task.s(shop_id) for shop_id in range(1000)])
    flush(app)
    advance(app, 3600)

    again = apply_many([task.s(shop_id) for shop_id in range(1000)])

    assert [each.id for each in again] == [each.id for each in held]
    assert lost == []


@pytest.mark.server
def test_a_task_that_waits_in_the_database_of_the_locks_is_never_released(
    redis_url: str, lost: list[dict[str, Any]]
) -> None:
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, function=echo)
    held = apply_many([task.s(shop_id) for shop_id in range(1000)])
    advance(app, 3600)

    again = apply_many([task.s(shop_id) for shop_id in range(1000)])

    assert [each.id for each in again] == [each.id for each in held]
    assert lost == []


@pytest.mark.server
@pytest.mark.parametrize("store", ["redis", "postgres"])
@pytest.mark.parametrize("limits", [NO_HURRY, healing.OF_A_CALL], ids=["operator", "call"])
def test_the_rule_proves_none_of_a_thousand_lost_that_wait_for_an_hour(
    request: Any, redis_url: str, store: str, limits: Limits
) -> None:
    """Each is searched for, while a call searches for one in a while."""
    store_url = redis_url if store == "redis" else request.getfixturevalue(f"{store}_url")
    app = make_app(
        store_url, broker=redis_url, backend=redis_url, worker_enable_remote_control=True
    )
    task = define(app, unique=True, function=echo)
    apply_many([task.s(shop_id) for shop_id in range(990)])
    apply_many([task.s(shop_id).set(queue="named") for shop_id in range(990, 1000)])
    advance(app, 3600)

    def proven() -> list[str]:
        app_state = state_of(app)
        now = StoreClock(app_state).now()
        views = [
            lock for key, record in app_state.store.walk() for lock in locks_of(key, record, now)
        ]
        assert len(views) == 1000
        found = missing_messages(app_state, views, 0.3, limits=limits)
        return [each.lock.task_id for each in found if not each.unless]

    assert proven() == []
    app.control.purge()
    assert len(proven()) == 990


@pytest.mark.server
def test_a_search_in_any_queue_finds_a_task_that_waits(
    redis_url: str, lost: list[dict[str, Any]], monkeypatch: Any
) -> None:
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, function=echo)
    held = [task.apply_async((shop_id,), queue=f"q{shop_id % 3}") for shop_id in range(10)]
    advance(app, 3600)
    monkeypatch.setattr(healing, "PAUSE_S", 0)
    searched: list[str] = []
    search = lost_messages.not_in_queues

    def noted(*args: Any) -> Any:
        searched.append("")
        return search(*args)

    monkeypatch.setattr(lost_messages, "not_in_queues", noted)
    again = [task.delay(shop_id) for shop_id in range(10)]

    assert [each.id for each in again] == [each.id for each in held]
    assert len(searched) == 10
    assert lost == []


def test_a_task_that_waits_for_its_retry_is_not_released(app: Celery) -> None:
    @app.task(name="shop.retries", bind=True, unique=True)
    def retries(self: Any, shop_id: int) -> None:
        raise self.retry(countdown=7200)

    first = retries.delay(7)
    with working(app):
        while app.AsyncResult(first.id).state != "RETRY":
            time.sleep(0.01)
    advance(app, 3600)

    assert retries.delay(7).id == first.id


def test_the_result_of_an_earlier_life_of_an_id_is_no_proof(app: Celery) -> None:
    task = define(app, unique=True, function=echo)
    with working(app):
        value_of(task.apply_async((7,), task_id=f"order-{app.main}"))
    waits = task.apply_async((7,), task_id=f"order-{app.main}")
    flush(app)
    assert waits.state == "SUCCESS"
    advance(app, 3600)

    assert task.delay(7).id == waits.id
    assert lookup(task, (7,)).task_id == waits.id


# -- what it costs ----------------------------------------------------------------------------


def test_a_holder_is_checked_once_in_a_while(local_app: Celery, monkeypatch: Any) -> None:
    app = local_app
    task = define(app, unique=True, function=echo)
    checks: list[str] = []
    ended_here = healing.ended_here

    def noted(app_state: Any, lock: Any) -> str:
        checks.append(lock.task_id)
        return ended_here(app_state, lock)

    monkeypatch.setattr(healing, "ended_here", noted)
    first = task.delay(7)
    scheduled = task.apply_async((8,), countdown=7200)
    for _ in range(3):
        task.delay(7)
    assert checks == []
    advance(app, CHECK_AFTER_S + 1)
    for shop_id in (7, 8) * 3:
        assert task.delay(shop_id).id in (first.id, scheduled.id)

    assert checks == [first.id]


def test_a_result_backend_that_hangs_delays_one_call_for_a_bounded_time(caplog: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = make_app(
            "memory://",
            backend=f"redis://127.0.0.1:{silent.getsockname()[1]}/0",
            unique_store_timeout=0.3,
        )
        task = define(app, unique=True, ignore_result=True)
        held = [task.delay(shop_id) for shop_id in range(20)]
        advance(app, 3600)

        began = time.monotonic()
        again = [task.delay(shop_id) for shop_id in range(20)]

        assert [each.id for each in again] == [each.id for each in held]
        assert time.monotonic() - began < 3
        assert "was not checked within 0.3 s" in caplog.text


def test_a_continuation_checks_nothing(local_app: Celery, monkeypatch: Any) -> None:
    app = local_app
    task = define(app, unique=True, function=echo)
    other = define(app, "shop.first", function=echo)
    task.apply_async((7,), queue="nowhere")
    advance(app, 3600)
    checks: list[str] = []
    monkeypatch.setattr(healing.StaleHolders, "heal", lambda *_: checks.append(""))

    with working(app):
        value_of(other.apply_async((7,), link=task.si(7)))
    assert checks == []

    task.delay(7)
    assert checks == [""]


# -- the message is lost ----------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.parametrize(
    ("workers", "store"),
    [
        ("none", "redis"),
        ("with the library", "redis"),
        ("without it", "redis"),
        ("none", "postgres"),
        ("none", "mariadb"),
        ("none", "cluster"),
    ],
)
def test_a_purged_message_blocks_no_call_for_long(
    request: Any,
    redis_url: str,
    workers: str,
    store: str,
    lost: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker that does not reply in half a second proves nothing, and the next call asks again.
    monkeypatch.setattr(healing, "PAUSE_S", 0)
    store_url = redis_url if store == "redis" else request.getfixturevalue(f"{store}_url")
    app = make_app(
        store_url,
        broker=redis_url,
        backend=redis_url,
        worker_enable_remote_control=True,
        unique_namespace=f"test-{uuid4()}",
    )
    task = define(app, unique=True, function=echo, ignore_result=True)
    first = task.delay(7)
    app.control.purge()
    flush(app)
    advance(app, CHECK_AFTER_S + 1)

    def call() -> Any:
        result = task.apply_async((7,), countdown=3600)
        return result if result.outcome == "created" else None

    if workers == "with the library":
        with working(app):
            eventually(call)
    elif workers == "without it":
        with plain_worker(app):
            eventually(call)
    else:
        eventually(call)

    [fact] = lost
    assert fact["task_id"] == first.id
    assert "neither the broker nor a worker has its message" in fact["reason"]


@pytest.mark.server
def test_a_message_that_a_worker_without_the_library_runs_is_not_lost(redis_url: str) -> None:
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, ignore_result=True)
    began, may_end = threading.Event(), threading.Event()

    def waits(shop_id: int) -> None:
        began.set()
        assert may_end.wait(30)

    first = task.delay(7)
    with plain_worker(app, waits):
        assert began.wait(30)
        advance(app, 3600)
        again = task.delay(7)
        may_end.set()

    assert again.id == first.id


#: As gocelery publishes it: without the headers, which kombu does not need.
OF_ANOTHER_PROGRAM = json.dumps(
    {
        "body": "",
        "content-type": "application/json",
        "properties": {
            "body_encoding": "base64",
            "delivery_info": {"priority": 0},
            "delivery_tag": "1",
        },
    }
)


@pytest.mark.server
@pytest.mark.parametrize(
    "other",
    [
        OF_ANOTHER_PROGRAM,
        json.dumps({**json.loads(OF_ANOTHER_PROGRAM), "headers": None}),
        json.dumps({"body": ""}),
        "\xff is not JSON",
    ],
    ids=["no headers", "headers of null", "no properties", "not JSON"],
)
def test_a_message_behind_one_of_another_program_is_found(redis_url: str, other: str) -> None:
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    # New messages are added at the head, and the search begins there.
    redis.Redis.from_url(redis_url).lpush(app.conf.task_default_queue, other)
    flush(app)
    advance(app, CHECK_AFTER_S + 1)

    assert task.delay(7).id == first.id


@pytest.mark.server
@pytest.mark.parametrize("place", ["queue", "unacked"])
def test_nothing_is_lost_while_an_element_of_a_queue_cannot_be_read(
    redis_url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "PAUSE_S", 0)
    app = make_app(broker=redis_url, backend=redis_url, worker_enable_remote_control=True)
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    app.control.purge()
    client = redis.Redis.from_url(redis_url)
    client.lpush("something else", "{}")
    if place == "queue":
        client.lpush(app.conf.task_default_queue, OF_ANOTHER_PROGRAM, "(compressed)")
    else:
        client.hset("unacked", "tag", "(compressed)")
    flush(app)
    advance(app, CHECK_AFTER_S + 1)
    app_state = state_of(app)
    record, now = app_state.store.read(first.unique_key)
    views = list(locks_of(first.unique_key, record, now))

    [unproven] = missing_messages(app_state, views, 0.3)
    again = task.delay(7)
    client.delete(app.conf.task_default_queue, "unacked")
    record, now = app_state.store.read(first.unique_key)
    views = list(locks_of(first.unique_key, record, now))
    [proven] = missing_messages(app_state, views, 0.3)

    assert "cannot be read as a message" in unproven.unless
    assert again.id == first.id
    assert proven.unless == ""


@pytest.mark.server
def test_a_message_that_a_worker_fetches_during_the_search_is_not_lost(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the library does not report what waits for its ETA or rate limit."""
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    client, queued = redis.Redis.from_url(redis_url), queues._queued

    def fetched_before(*args: Any) -> set[str]:
        message = json.loads(client.rpop(app.conf.task_default_queue))
        client.hset("unacked", "tag", json.dumps([message, "", app.conf.task_default_queue]))
        return queued(*args)

    monkeypatch.setattr(queues, "_queued", fetched_before)

    assert "Redis delivers it again" in verdict_on(app, first)


# -- the message is in another broker ---------------------------------------------------------


def verdict_on(app: Celery, result: Any) -> str:
    """Why the message of the holder may exist; empty: it is proven lost."""
    flush(app)
    advance(app, CHECK_AFTER_S + 1)
    app_state = state_of(app)
    record, now = app_state.store.read(result.unique_key)
    [missing] = missing_messages(app_state, locks_of(result.unique_key, record, now), 0.3)
    return missing.unless


@pytest.mark.server
@pytest.mark.parametrize("by", ["connection", "producer"])
@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_message_that_was_published_to_another_broker_is_not_lost(
    redis_server: RedisServer, by: str, store: str
) -> None:
    url, other = redis_server.fresh_url(), redis_server.fresh_url()
    app = make_app("memory://" if store == "memory" else url, broker=url, backend=url)
    task = define(app, unique=True, function=echo)
    with app.connection_for_write(other) as connection:
        given = connection if by == "connection" else app.amqp.Producer(connection)
        first = task.apply_async((7,), **{by: given})
    [message] = redis.Redis.from_url(other).lrange(app.conf.task_default_queue, 0, -1)
    assert json.loads(message)["headers"]["id"] == first.id

    verdict = verdict_on(app, first)

    assert verdict == "its call was published through a connection to another broker"
    assert task.delay(7).id == first.id


@pytest.mark.server
@pytest.mark.parametrize("by", ["connection", "producer", "group", "apply_many"])
def test_a_message_that_was_published_through_a_connection_of_the_app_can_be_lost(
    redis_url: str, by: str
) -> None:
    app = make_app(broker=redis_url, backend=redis_url)
    task = define(app, unique=True, function=echo)
    if by == "group":
        group([task.s(7)]).apply_async()
    elif by == "apply_many":
        apply_many([task.s(7)])
    else:
        with app.connection_for_write() as connection:
            given = connection if by == "connection" else app.amqp.Producer(connection)
            task.apply_async((7,), **{by: given})
    key = task.delay(7).unique_key
    app.control.purge()

    assert verdict_on(app, SimpleNamespace(unique_key=key)) == ""


@pytest.mark.server
def test_nothing_is_lost_while_a_fail_over_list_names_another_broker(
    redis_server: RedisServer,
) -> None:
    first_url, second_url = redis_server.fresh_url(), redis_server.fresh_url()
    app = make_app("memory://", broker=f"{second_url};{first_url}", backend=first_url)
    task = define(app, unique=True, function=echo)
    first = task.delay(7)
    # The connection for the search is made to another broker of the list than the message went to.
    app.conf.broker_url = app.conf.broker_read_url = f"{first_url};{second_url}"

    verdict = verdict_on(app, first)

    assert verdict == "broker_url lists several brokers, and its message may be in another"


@pytest.mark.server
def test_nothing_is_lost_while_calls_are_published_to_one_broker_and_read_from_another(
    redis_server: RedisServer,
) -> None:
    read, write = redis_server.fresh_url(), redis_server.fresh_url()
    app = make_app(
        "memory://", broker=read, backend=read, broker_read_url=read, broker_write_url=write
    )
    task = define(app, unique=True, function=echo)

    verdict = verdict_on(app, task.delay(7))

    assert verdict == "broker_write_url and broker_read_url differ"


def test_a_connection_that_has_failed_over_is_still_one_of_the_app() -> None:
    """As to another sentinel of the same broker."""
    app = make_app("memory://", broker="sentinel://a:1;sentinel://b:2")
    connection = app.connection_for_write().clone()
    before = address_of(connection)

    connection.maybe_switch_next()

    assert connection.hostname == "b"
    assert address_of(connection) == before == address_of(app.connection_for_write())
