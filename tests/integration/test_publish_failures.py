"""A call whose publish fails leaves no lock, and a store that is down costs bounded time."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import EncodeError, OperationalError

import celery_unique
from celery_unique import StoreUnavailable, UniqueKeyError, lookup
from celery_unique.config.app_state import state_of
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores import circuit_breaker as breaker
from tests.support import RedisServer, TcpProxy, eventually, quickest
from tests.support.app import flush, locks, make_app, messages, value_of, working
from tests.support.server import HOST, free_port
from tests.support.worker import REPOSITORY


def task_of(app: Celery, **options: Any) -> Any:
    @app.task(name="shop.rebuild", **{"unique": True, **options})
    def rebuild(shop_id: int, payload: Any = None) -> int:
        return shop_id

    return rebuild


Send = Callable[..., Any]


def replace_publish(app: Celery, make: Callable[[Send], Send]) -> None:
    """Put something in the place of the last step of a publish."""
    app.amqp.send_task_message = make(app.amqp.send_task_message)


def raising(error: BaseException, times: int = 1) -> Callable[[Send], Send]:
    left = [error] * times

    def make(original: Send) -> Send:
        def send(*args: Any, **options: Any) -> Any:
            if left:
                raise left.pop()
            return original(*args, **options)

        return send

    return make


# -- the publish fails ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [OperationalError("broker"), OSError("network"), KeyboardInterrupt(), SystemExit(1)],
    ids=lambda error: type(error).__name__,
)
def test_a_publish_that_raises_gives_the_lock_back_and_raises_on(app, error):
    rebuild = task_of(app)
    replace_publish(app, raising(error))

    with pytest.raises(type(error)) as raised:
        rebuild.delay(7)

    assert raised.value is error
    assert lookup(rebuild, (7,)) is None
    assert rebuild.delay(7).outcome == "created"
    assert len(messages(app)) == 1


@pytest.mark.parametrize("broker", ["amqp", "redis"])
def test_a_broker_that_is_not_there_leaves_no_lock(broker):
    app = make_app("memory://", broker_url=f"{broker}://{HOST}:{free_port()}")
    rebuild = task_of(app)

    with pytest.raises(OperationalError):
        rebuild.apply_async((7,), retry_policy={"max_retries": 1, "interval_start": 0.01})

    assert locks(app) == []


def test_an_argument_that_cannot_be_sent_leaves_no_lock(app):
    rebuild = task_of(app, unique_on="shop_id")

    with pytest.raises(EncodeError):
        rebuild.delay(7, payload=object())

    assert lookup(rebuild, (7,)) is None
    assert messages(app) == []
    assert rebuild.delay(7).outcome == "created"


def test_an_argument_that_makes_no_key_is_named_and_leaves_no_lock(app):
    rebuild = task_of(app)

    with pytest.raises(UniqueKeyError, match=r"payload.*unique_key=") as raised:
        rebuild.delay(7, payload=object())

    assert raised.value.argument == "payload"
    assert locks(app) == []
    assert messages(app) == []


def test_a_message_that_went_out_although_its_publish_raised_is_dropped(app):
    ran: list[str] = []

    @app.task(name="shop.rebuild", unique=True, bind=True)
    def rebuild(self: Any, shop_id: int) -> None:
        ran.append(self.request.id)

    def lands_and_raises(original: Send) -> Send:
        def send(*args: Any, **options: Any) -> Any:
            app.amqp.send_task_message = original
            original(*args, **options)
            raise OperationalError("no answer from the broker")

        return send

    replace_publish(app, lands_and_raises)
    with pytest.raises(OperationalError):
        rebuild.delay(7)
    again = rebuild.delay(7)
    assert again.outcome == "created"
    assert len(messages(app)) == 2

    with working(app):
        value_of(again)

    assert ran == [again.id]


# -- a duplicate of a publish that is on its way ----------------------------------------------


class SlowPublish:
    """The first publish waits until it is let go, and can then fail."""

    def __init__(self, app: Celery) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()
        self.error: BaseException | None = None
        self._first = True
        replace_publish(app, self._around)

    def _around(self, original: Send) -> Send:
        def send(*args: Any, **options: Any) -> Any:
            if self._first:
                self._first = False
                self.began.set()
                assert self.let_go.wait(20)
                if self.error is not None:
                    raise self.error
            return original(*args, **options)

        return send


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_duplicate_of_a_slow_publish_is_answered_with_a_task_that_is_published(app, background):
    rebuild = task_of(app)
    slow = SlowPublish(app)
    first = background.submit(rebuild.delay, 7)
    slow.began.wait(10)

    again = rebuild.delay(7)

    published = [sent.id for sent in messages(app)]
    slow.let_go.set()
    assert (again.outcome, again.id) == ("deduplicated", first.result(10).id)
    assert published == [again.id]


def test_two_messages_of_a_helped_task_run_its_body_once(app, background):
    ran: list[str] = []

    @app.task(name="shop.rebuild", unique=True, bind=True)
    def rebuild(self: Any, shop_id: int) -> None:
        ran.append(self.request.id)

    slow = SlowPublish(app)
    first = background.submit(rebuild.delay, 7)
    slow.began.wait(10)
    again = rebuild.delay(7)
    slow.let_go.set()
    first.result(10)
    assert [sent.id for sent in messages(app)] == [again.id, again.id]

    with working(app):
        value_of(again)
        marker = rebuild.delay(8)
        value_of(marker)

    assert ran == [again.id, marker.id]


def test_a_duplicate_of_a_slow_publish_does_not_cut_off_the_chain_behind_it(app, background):
    """A copy of its first link would run in its place, without the rest of the chain."""
    ran: list[str] = []

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    @app.task(name="shop.announce")
    def announce(shop_id: int) -> None:
        ran.append("announce")

    slow = SlowPublish(app)
    first = background.submit((rebuild.s(7) | announce.s()).apply_async)
    slow.began.wait(10)

    again = rebuild.delay(7)

    head = lookup(rebuild, (7,)).task_id
    slow.let_go.set()
    tail = first.result(10)
    assert again.outcome == "bypassed"
    assert [sent.id for sent in messages(app)] == [again.id, head]
    with working(app):
        value_of(tail)
        value_of(again)
    assert ran == ["announce"]


def test_a_duplicate_is_not_lost_when_the_first_publish_fails_after_all(app, background):
    rebuild = task_of(app)
    slow = SlowPublish(app)
    slow.error = OperationalError("broker")
    first = background.submit(rebuild.delay, 7)
    slow.began.wait(10)

    again = rebuild.delay(7)
    slow.let_go.set()
    with pytest.raises(OperationalError):
        first.result(10)

    assert [sent.id for sent in messages(app)] == [again.id]
    assert lookup(rebuild, (7,)).task_id == again.id
    with working(app):
        assert value_of(again) == 7


def test_a_duplicate_whose_holder_fails_to_publish_meanwhile_is_published_itself(app, background):
    rebuild = task_of(app)
    slow = SlowPublish(app)
    slow.error = OperationalError("broker")
    first = background.submit(rebuild.delay, 7)
    slow.began.wait(10)
    threading.Timer(0.02, slow.let_go.set).start()  # while the duplicate looks again

    again = rebuild.delay(7)

    with pytest.raises(OperationalError):
        first.result(10)
    assert {sent.id for sent in messages(app)} == {again.id}
    assert lookup(rebuild, (7,)).task_id == again.id


DIES = """
    import os, sys
    from tests.support.app import make_app

    app = make_app(sys.argv[1])

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id, payload=None): ...

    app.amqp.send_task_message = lambda *args, **options: os._exit(3)
    rebuild.delay(7)
"""


def test_a_call_is_not_swallowed_by_a_caller_that_died_before_it_published(sqlite_url):
    died = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DIES), sqlite_url], cwd=REPOSITORY, timeout=60
    )
    app = make_app(sqlite_url)
    rebuild = task_of(app)

    result = rebuild.delay(7)

    assert died.returncode == 3
    assert [sent.id for sent in messages(app)] == [result.id]
    with working(app):
        assert value_of(result) == 7
        assert rebuild.delay(7).outcome == "created"


# -- the store is down --------------------------------------------------------------------------

TIMEOUT_S = 0.4
#: A busy machine may take this much longer.
MARGIN_S = 1.0


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server((HOST, 0), backlog=50) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def locked_file(tmp_path: Path) -> Iterator[str]:
    """A SQLite database that somebody else holds."""
    path = tmp_path / "locked.sqlite3"
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield f"sqlite:///{path}"
        other.execute("ROLLBACK")


DOWN = ["redis refused", "redis black hole", "postgresql refused", "postgresql black hole",
        "sqlite locked"]  # fmt: skip


@pytest.fixture(params=DOWN)
def url_of_a_store_that_is_down(request: pytest.FixtureRequest) -> str:
    kind, _, how = request.param.partition(" ")
    if kind == "sqlite":
        return str(request.getfixturevalue("locked_file"))
    port = free_port() if how == "refused" else request.getfixturevalue("black_hole")
    scheme = {"redis": "redis", "postgresql": "postgresql+psycopg"}[kind]
    return f"{scheme}://me:hunter2@{HOST}:{port}/{'0' if kind == 'redis' else 'locks'}"


@pytest.fixture
def store_errors(received: Any) -> Any:
    return received(celery_unique.unique_store_error)


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        call()
    return time.monotonic() - began


def test_a_store_that_is_down_gives_a_clear_error_in_bounded_time(
    url_of_a_store_that_is_down, store_errors
):
    app = make_app(url_of_a_store_that_is_down, unique_store_timeout=TIMEOUT_S)
    rebuild = task_of(app)

    with pytest.raises(StoreUnavailable) as raised:
        rebuild.delay(7)

    assert "hunter2" not in str(raised.value)
    assert messages(app) == []
    [told] = store_errors
    assert (told["sender"], told["act"]) == ("shop.rebuild", "acquire")
    assert told["exception"] is raised.value
    # Of other apps: this one soon leaves the store alone.
    url = url_of_a_store_that_is_down
    calls = quickest(
        lambda: [timed(lambda: task_of(make_app(url, unique_store_timeout=TIMEOUT_S)).delay(7))],
        below=[TIMEOUT_S + MARGIN_S],
    )
    assert max(calls) < TIMEOUT_S + MARGIN_S


def test_with_publish_on_store_error_the_call_is_published_without_a_lock(
    url_of_a_store_that_is_down, store_errors
):
    app = make_app(
        url_of_a_store_that_is_down, unique_store_timeout=TIMEOUT_S, unique_on_store_error="publish"
    )
    rebuild = task_of(app)

    began = time.monotonic()
    result = rebuild.delay(7)

    assert time.monotonic() - began < 2 * TIMEOUT_S + MARGIN_S
    assert (result.outcome, result.deduplicated) == ("bypassed", False)
    assert [sent.id for sent in messages(app)] == [result.id]
    assert store_errors[0]["act"] == "acquire"
    assert store_errors[0]["task_id"] == result.id


def assert_not_asked(took: list[float]) -> None:
    """A busy machine may hold one call up; a store that is asked holds up each."""
    *others, _ = sorted(took)
    assert max(others) < TIMEOUT_S / 2, took


def test_after_two_time_outs_the_store_is_left_alone_for_a_while(black_hole, store_errors):
    app = make_app(f"redis://{HOST}:{black_hole}", unique_store_timeout=TIMEOUT_S)
    rebuild = task_of(app)

    took = [timed(lambda: rebuild.delay(7)) for _ in range(5)]

    assert min(took[:2]) >= TIMEOUT_S * 0.9
    assert_not_asked(took[2:])
    assert [told["act"] for told in store_errors] == ["acquire"] * 5


def test_calls_that_are_published_without_a_store_do_not_wait_for_it_either(black_hole):
    app = make_app(
        f"redis://{HOST}:{black_hole}",
        unique_store_timeout=TIMEOUT_S,
        unique_on_store_error="publish",
    )
    rebuild = task_of(app)

    took = []
    for _ in range(5):
        began = time.monotonic()
        rebuild.delay(7)
        took.append(time.monotonic() - began)

    assert min(took[:2]) < TIMEOUT_S + MARGIN_S
    assert_not_asked(took[2:])
    assert len(messages(app)) == 5


def test_calls_that_did_not_ask_the_store_leave_nothing_to_give_back(black_hole):
    app = make_app(f"redis://{HOST}:{black_hole}", unique_store_timeout=TIMEOUT_S)
    rebuild = task_of(app)

    for _ in range(20):
        timed(lambda: rebuild.delay(7))

    assert state_of(app).part(UniqueTaskCoordinator).client.retries.waiting() <= 2


@pytest.fixture
def proxied(redis_server: RedisServer, start_proxy: Callable[[int], TcpProxy]) -> Any:
    """A Redis database behind a network that can fail, and an app that keeps its locks there."""
    proxy = start_proxy(redis_server.port)
    url = redis_server.fresh_url()
    app = make_app(proxy.url_of(url), unique_store_timeout=TIMEOUT_S)
    yield proxy, app
    state_of(app).store.close()


def test_the_store_is_asked_again_when_the_while_is_over(proxied, monkeypatch):
    monkeypatch.setattr(breaker, "OPEN_FOR_S", 0.3)
    proxy, app = proxied
    rebuild = task_of(app)
    proxy.cut()
    for _ in range(3):
        timed(lambda: rebuild.delay(7))

    proxy.restore()

    result = eventually(lambda: rebuild.delay(7), ignoring=StoreUnavailable)
    assert result.outcome == "created"


def test_a_lock_that_a_timed_out_call_may_have_taken_is_given_back(proxied):
    proxy, app = proxied
    rebuild = task_of(app)
    rebuild.delay(1)  # connected, and the script is known
    flush(app)

    proxy.stall_replies()
    timed(lambda: rebuild.delay(7))
    proxy.restore()

    eventually(lambda: lookup(rebuild, (7,)) is None, message="the lock of the lost call")
    assert rebuild.delay(7).outcome == "created"
    assert {sent.args[0] for sent in messages(app)} == {1, 7}


def test_a_call_published_after_a_time_out_is_not_dropped_although_it_had_the_lock(proxied):
    proxy, app = proxied
    app.conf.unique_on_store_error = "publish"
    rebuild = task_of(app)
    rebuild.delay(1)
    flush(app)

    proxy.stall_replies()
    result = rebuild.delay(7)
    proxy.restore()

    assert result.outcome == "bypassed"
    with working(app):
        assert value_of(result) == 7


def test_giving_back_is_repeated_until_the_store_answers(proxied):
    proxy, app = proxied
    rebuild = task_of(app)

    def loses_broker_and_store(original: Send) -> Send:
        def send(*args: Any, **options: Any) -> Any:
            app.amqp.send_task_message = original
            proxy.cut()
            raise OperationalError("everything is down")

        return send

    replace_publish(app, loses_broker_and_store)
    with pytest.raises(OperationalError):
        rebuild.delay(7)
    proxy.restore()

    eventually(lambda: lookup(rebuild, (7,)) is None, message="the lock of the failed call")
