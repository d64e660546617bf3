"""On Redis a message is made while the store decides, and sent only if the lock was taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
import redis
from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

import celery_unique
from celery_unique import StoreUnavailable, lookup
from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER
from celery_unique.publish import store_client
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores.redis import connections
from celery_unique.stores.redis import store as redis_store
from tests.support import RedisServer, eventually
from tests.support.app import flush, locks, make_app, messages, plain_app

pytestmark = pytest.mark.server


@pytest.fixture
def app(redis_server: RedisServer) -> Iterator[Celery]:
    app = make_app(redis_server.fresh_url())
    yield app
    state_of(app).store.close()


def task_of(app: Celery, **options: Any) -> Any:
    @app.task(name="shop.rebuild", **{"unique": True, **options})
    def rebuild(shop_id: int) -> int:
        return shop_id

    return rebuild


class Steps:
    """What happens to a call, in order."""

    def __init__(self, app: Celery) -> None:
        self.seen: list[str] = []
        store: Any = state_of(app).store
        begin, acquire = store.begin_acquire, store.acquire
        amqp = app.amqp
        make, send = amqp.create_task_message, amqp.send_task_message

        def begun(*args: Any) -> Any:
            self.seen.append("ask")
            wait = begin(*args)

            def heard() -> Any:
                self.seen.append("hear")
                return wait()

            return heard

        store.begin_acquire = begun
        store.acquire = self._noting("ask and hear", acquire)
        amqp.create_task_message = self._noting("make", make)
        amqp.send_task_message = self._noting("send", send)

    def _noting(self, step: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.seen.append(step)
            return act(*args, **options)

        return noted

    def of(self, call: Callable[[], Any]) -> list[str]:
        self.seen.clear()
        call()
        return list(self.seen)


def test_the_message_is_made_between_question_and_answer(app):
    rebuild = task_of(app)
    steps = Steps(app)

    assert steps.of(lambda: rebuild.delay(7)) == ["ask", "make", "hear", "send"]
    [sent] = messages(app)
    assert sent.headers[HEADER]["id"] == sent.id
    assert sent.headers[HEADER]["at"] > 0


def test_a_duplicate_is_not_sent_and_the_next_one_is_not_even_made(app):
    rebuild = task_of(app)
    first = rebuild.delay(7)
    client = state_of(app).part(UniqueTaskCoordinator).client
    client.taken_until.clear()  # as if another process had made it
    steps = Steps(app)

    assert steps.of(lambda: rebuild.delay(7)) == ["ask", "make", "hear"]
    assert steps.of(lambda: rebuild.delay(7)) == ["ask and hear"]
    assert rebuild.delay(7).id == first.id
    assert len(messages(app)) == 1


def test_a_key_that_is_free_again_is_asked_for_in_two_steps_again(app, monkeypatch):
    monkeypatch.setattr(store_client, "REPEATED_WITHIN_S", 0)
    rebuild = task_of(app)
    rebuild.delay(7)
    rebuild.delay(7)
    assert celery_unique.release(rebuild, (7,))
    steps = Steps(app)

    assert steps.of(lambda: rebuild.delay(7)) == ["ask and hear", "make", "send"]
    assert celery_unique.release(rebuild, (7,))
    assert steps.of(lambda: rebuild.delay(7)) == ["ask", "make", "hear", "send"]


@pytest.mark.parametrize(
    ("options", "call"),
    [({"unique_on_conflict": "replace"}, {}), ({}, {"countdown": 60})],
    ids=["replacing", "delayed"],
)
def test_what_depends_on_the_answer_is_made_after_it(app, options, call):
    rebuild = task_of(app, **options)
    steps = Steps(app)

    made = steps.of(lambda: rebuild.apply_async((7,), **call))

    assert made == ["ask and hear", "make", "send"]


def test_a_duplicate_does_not_wait_for_a_result_under_its_own_id(app, monkeypatch):
    """With Redis results that would be a subscription that nobody ends."""
    rebuild = task_of(app)
    awaited: list[str] = []
    monkeypatch.setattr(app.backend, "on_task_call", lambda _, task_id: awaited.append(task_id))

    holder = rebuild.delay(7)
    rebuild.delay(7)

    assert awaited == [holder.id]


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_a_message_that_cannot_be_made_leaves_nothing_behind(app, held):
    rebuild = task_of(app)
    if held:
        rebuild.delay(7)
        flush(app)
    before = lookup(rebuild, (7,))

    def refuse(*_: Any, **__: Any) -> None:
        raise LookupError("no such queue")

    app.conf.task_routes = (refuse,)
    app.amqp.flush_routes()
    app.amqp.__dict__.pop("router", None)
    app.amqp._rtable = None
    with pytest.raises(LookupError):
        rebuild.delay(7)

    after = lookup(rebuild, (7,))
    assert (after and after.task_id) == (before and before.task_id)
    assert len(messages(app)) == (1 if held else 0)


def test_a_publish_that_fails_after_the_answer_gives_the_lock_back(app):
    rebuild = task_of(app)

    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("broker")

    sent, app.amqp.send_task_message = app.amqp.send_task_message, fail
    with pytest.raises(OperationalError):
        rebuild.delay(7)
    app.amqp.send_task_message = sent

    assert lookup(rebuild, (7,)) is None
    assert rebuild.delay(7).outcome == "created"


def test_headers_that_somebody_copies_on_the_way_lose_nothing(redis_server):
    """As monitoring libraries do, which wrap ``send_task`` of the class."""
    app = plain_app()
    original = app.send_task

    def traced(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "headers": {**options.get("headers", {}), "a": "b"}})

    app.send_task = traced
    celery_unique.install(app, store_url=redis_server.fresh_url())
    rebuild = task_of(app)

    first, again = rebuild.delay(7), rebuild.delay(7)

    assert again.id == first.id
    [sent] = messages(app)
    assert sent.headers["a"] == "b"
    assert sent.headers[HEADER]["id"] == first.id
    state_of(app).store.close()


def test_a_message_that_is_not_made_by_celery_is_sent_without_a_lock_once_and_says_so(
    redis_server, caplog
):
    """From then on the header is given to ``send_task``, which may know what to do with it."""
    app = plain_app()
    sent: list[tuple[str, Any]] = []

    def own_way(name: str, args: Any, kwargs: Any, task_id: str, **options: Any) -> Any:
        sent.append((task_id, (options.get("headers") or {}).get(HEADER)))
        return app.AsyncResult(task_id)

    app.send_task = own_way
    celery_unique.install(app, store_url=redis_server.fresh_url())
    rebuild = task_of(app)

    with caplog.at_level(logging.WARNING, logger="celery_unique"):
        result = rebuild.delay(7)

    # An empty header: a worker runs it without a lock.
    assert (result.outcome, sent) == ("bypassed", [(result.id, {})])
    assert f"publishing shop.rebuild[{result.id}] without a lock" in caplog.text
    assert lookup(rebuild, (7,)) is None

    second, third = rebuild.delay(7), rebuild.delay(7)

    assert (second.outcome, third.outcome, third.id) == ("created", "deduplicated", second.id)
    assert [header.get("id") for _, header in sent] == [None, second.id]
    state_of(app).store.close()


def retrying(app: Celery, redis_server: RedisServer, on: type[Exception]) -> Any:
    """A unique task of an app whose ``send_task`` tries once more, as some projects write it."""
    original = app.send_task

    def try_twice(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except on:
            return original(*args, **options)

    app.send_task = try_twice
    celery_unique.install(app, store_url=redis_server.fresh_url())
    return task_of(app)


def test_a_publish_that_somebody_tries_again_has_its_header(redis_server):
    app = plain_app()
    rebuild = retrying(app, redis_server, OperationalError)
    send, failures = app.amqp.send_task_message, [OperationalError("broker")]

    def fail_once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return send(*args, **options)

    app.amqp.send_task_message = fail_once
    result = rebuild.delay(7)

    assert (result.outcome, failures) == ("created", [])
    assert [sent.headers[HEADER]["id"] for sent in messages(app)] == [result.id]
    state_of(app).store.close()


def test_a_duplicate_that_somebody_tries_again_is_still_one(redis_server):
    app = plain_app()
    rebuild = retrying(app, redis_server, Exception)

    first, again = rebuild.delay(7), rebuild.delay(7)

    assert (again.outcome, again.id) == ("deduplicated", first.id)
    assert len(messages(app)) == 1
    state_of(app).store.close()


@pytest.mark.parametrize("way", ["a plain tuple", "nobody may set it"])
def test_messages_of_an_amqp_class_of_the_users_own(redis_server, way):
    class Own(AMQP):
        if way == "a plain tuple":

            @property
            def create_task_message(self) -> Any:
                make = super().create_task_message
                return self.__dict__.get("made") or (lambda *a, **o: tuple(make(*a, **o)))

            @create_task_message.setter
            def create_task_message(self, make: Any) -> None:
                self.__dict__["made"] = make
        else:

            @property
            def create_task_message(self) -> Any:
                return super().create_task_message

    app = Celery("own", broker="memory://", amqp=Own, set_as_current=False)
    app.conf.task_default_queue = f"own-{way}"
    celery_unique.install(app, store_url=redis_server.fresh_url())
    rebuild = task_of(app)

    first, again = rebuild.delay(7), rebuild.delay(7)

    assert (first.outcome, again.id) == ("created", first.id)
    assert [sent.headers[HEADER]["id"] for sent in messages(app)] == [first.id]
    state_of(app).store.close()


def test_a_call_that_is_made_while_another_one_is_being_made(app):
    """By a router, or by a receiver of a signal: each waits for its own answer."""
    rebuild = task_of(app)
    inner: list[Any] = []

    def route(name: str, args: Any, kwargs: Any, options: Any, **_: Any) -> None:
        if args == (7,) or args == [7]:
            inner.append(rebuild.delay(8))

    app.conf.task_routes = (route,)
    outer = rebuild.delay(7)

    assert [outer.outcome, *(each.outcome for each in inner)] == ["created"] * (1 + len(inner))
    assert inner
    assert {sent.headers[HEADER]["id"] for sent in messages(app)} == {
        outer.id,
        *(each.id for each in inner if not each.deduplicated),
    }


def test_receivers_of_before_task_publish_see_the_header(app):
    rebuild = task_of(app)
    seen: list[Any] = []

    def note(headers: dict[str, Any] | None = None, **_: Any) -> None:
        seen.append(dict(headers or {}))

    signals.before_task_publish.connect(note, sender="shop.rebuild")
    try:
        result = rebuild.delay(7)
    finally:
        signals.before_task_publish.disconnect(note, sender="shop.rebuild")

    assert [headers[HEADER]["id"] for headers in seen] == [result.id]


# -- the store in between ------------------------------------------------------------------


def test_a_server_that_has_forgotten_the_script_is_told_it_again(app, redis_server):
    rebuild = task_of(app)
    rebuild.delay(1)
    flush(app)
    with redis.Redis.from_url(redis_server.url) as client:
        client.script_flush()

    assert rebuild.delay(7).outcome == "created"
    flush(app)
    with redis.Redis.from_url(redis_server.url) as client:
        client.script_flush()
    assert rebuild.delay(7).outcome == "deduplicated"


@pytest.mark.parametrize("half", ["replies", "requests"])
def test_an_answer_that_was_cut_off_is_asked_for_again(redis_server, start_proxy, half):
    proxy = start_proxy(redis_server.port)
    app = make_app(proxy.url_of(redis_server.fresh_url()))
    rebuild = task_of(app)
    rebuild.delay(0)
    flush(app)
    make = app.amqp.create_task_message

    def cut_meanwhile(*args: Any, **options: Any) -> Any:
        if half == "replies":
            proxy.stall_replies()
        proxy.cut()
        proxy.restore()
        return make(*args, **options)

    app.amqp.create_task_message = cut_meanwhile
    results = [rebuild.delay(number) for number in range(1, 6)]
    app.amqp.create_task_message = make

    assert {result.outcome for result in results} == {"created"}
    assert len(messages(app)) == 6
    state_of(app).store.close()


def test_an_answer_that_does_not_come_is_an_error_in_time_and_leaves_no_lock(
    redis_server, start_proxy
):
    proxy = start_proxy(redis_server.port)
    app = make_app(proxy.url_of(redis_server.fresh_url()), unique_store_timeout=1)
    rebuild = task_of(app)
    rebuild.delay(0)
    flush(app)
    proxy.stall_replies()

    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        rebuild.delay(7)

    proxy.restore()
    assert len(messages(app)) == 1

    def is_free() -> bool:
        with suppress(StoreUnavailable):
            return lookup(rebuild, (7,)) is None
        return False

    eventually(is_free, timeout=20)
    assert len(locks(app)) >= 1
    state_of(app).store.close()


@pytest.mark.parametrize("way", ["in two steps", "in one step"])
def test_a_time_limit_while_the_answer_is_awaited_is_raised_and_frees_the_key(
    app, monkeypatch, way
):
    """Celery's soft time limit is raised wherever the body happens to be."""
    rebuild = task_of(app)
    rebuild.delay(0)
    flush(app)
    if way == "in one step":
        monkeypatch.setattr(state_of(app).part(UniqueTaskCoordinator), "overlapped", None)
    read = connections.reply_of
    strikes = [SoftTimeLimitExceeded()]

    def interrupted(connection: Any) -> Any:
        if strikes:
            raise strikes.pop()
        return read(connection)

    monkeypatch.setattr(connections, "reply_of", interrupted)
    with pytest.raises(SoftTimeLimitExceeded):
        rebuild.delay(7)

    eventually(lambda: lookup(rebuild, (7,)) is None)
    assert len(messages(app)) == 1
    assert rebuild.delay(7).outcome == "created"


def test_a_time_limit_after_the_answer_leaves_nobody_the_reply_of_another(app, monkeypatch):
    """The connection is idle by then, and may be in use by another thread."""
    rebuild = task_of(app)
    rebuild.delay(0)
    flush(app)
    understand = redis_store._acquired
    asked: list[Any] = []
    store: Any = state_of(app).store

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(redis_store, "_acquired", understand)
        connection = store._connections.take(monotonic() + 5)
        connections.send(connection, [("ECHO", "of another")])
        asked.append(connection)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(redis_store, "_acquired", interrupted)
    with pytest.raises(SoftTimeLimitExceeded):
        rebuild.delay(7)

    assert connections.reply_of(asked[0]) == b"of another"
