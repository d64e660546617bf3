"""Lock and message in one act, on real Redis: when calls take it, and what becomes of failures."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import kombu
import pytest
import redis
from celery import Celery, group, signals
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.transport.redis import Channel

from celery_unique import (
    BatchInterrupted,
    DuplicateTask,
    StoreUnavailable,
    apply_many,
    manifest,
)
from celery_unique.config.app_state import state_of
from celery_unique.header import HEADER
from celery_unique.publish.atomic import why_two_steps
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores.base import LONGEST_TEXT, Start
from tests.support import RedisServer, eventually
from tests.support.app import define, make_app, working
from tests.support.proxy import TcpProxy
from tests.support.worker import REPOSITORY

pytestmark = [pytest.mark.server, pytest.mark.versions]


def _for_redis_py(url: str) -> str:
    return url.replace("redis+socket:", "unix:").replace("virtual_host=", "db=")


class Place:
    """An app whose broker, lock store and result backend are one Redis database."""

    def __init__(self, url: str, **conf: Any) -> None:
        options = {"broker": url, "backend": url, **conf}
        self.app: Celery = make_app(**options)
        self.redis = redis.Redis.from_url(_for_redis_py(url))
        self.task = define(self.app, unique=True)
        self.queue: str = self.app.conf.task_default_queue
        #: How many messages the store was handed.
        self.pushed = 0
        store: Any = state_of(self.app).store
        begin = getattr(store, "begin_publish", None)

        def begin_publish(pushes: Any) -> Any:
            self.pushed += len(pushes)
            return begin(pushes)

        store.begin_publish = begin_publish
        self.store = store

    def messages(self, queue: str | None = None) -> list[dict[str, Any]]:
        """Oldest first."""
        return [json.loads(text) for text in self.redis.lrange(queue or self.queue, 0, -1)[::-1]]

    def tasks(self) -> dict[str, Any]:
        self.store.flush()
        return {
            task_id: task
            for _, record in self.store.walk()
            for task_id, task in record.tasks.items()
        }

    def headers(self) -> list[dict[str, Any]]:
        return [message["headers"][HEADER] for message in self.messages()]


@pytest.fixture
def place_at() -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(url: str, **conf: Any) -> Place:
        places.append(Place(url, **conf))
        return places[-1]

    yield make
    for place in places:
        place.store.close()
        place.app.close()


@pytest.fixture
def place(place_at: Callable[..., Place], redis_url: str) -> Place:
    return place_at(redis_url)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


# -- the act -----------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["redis_url", "valkey_url"])
def test_a_new_call_is_available_as_soon_as_it_returns(request, place_at, server):
    place = place_at(request.getfixturevalue(server))

    result = place.task.delay(1)

    assert (result.outcome, result.deduplicated) == ("created", False)
    [message] = place.messages()
    [(task_id, task)] = place.tasks().items()
    assert message["headers"]["id"] == task_id == result.id
    assert (task.pending, place.pushed) == (False, 1)
    assert message["headers"][HEADER]["at"] == task.created_at  # the store's clock
    assert not message["headers"][HEADER].get("outcome")


def test_a_duplicate_pushes_nothing(place):
    first = place.task.delay(1)

    again, other = place.task.delay(1), place.task.delay(2)

    assert (again.id, again.outcome, again.holder_state) == (first.id, "deduplicated", "available")
    assert other.outcome == "created"
    assert len(place.messages()) == 2


def test_a_duplicate_of_another_process_builds_a_message_and_pushes_nothing(place, place_at):
    """It cannot know that the key is held."""
    url = place.app.conf.broker_url
    other = place_at(url, task_default_queue=place.queue)
    first = place.task.delay(1)

    again = other.task.delay(1)
    once_more = other.task.delay(1)

    assert again.id == once_more.id == first.id
    assert (other.pushed, len(place.messages())) == (1, 1)  # the second one was probed for


def test_a_probe_that_finds_the_key_free_is_followed_by_the_act(place):
    first = place.task.delay(1)
    place.task.delay(1)
    state_of(place.app).store.release(first.unique_key)

    assert place.task.delay(1).outcome == "created"
    assert (place.pushed, len(place.messages())) == (2, 2)


def test_a_replacement_and_what_it_replaces_are_one_act(place):
    latest = define(
        place.app, "shop.latest", unique=True, unique_on="shop_id", unique_on_conflict="replace"
    )
    old = latest.apply_async((1,), countdown=600)

    new = latest.apply_async((1, True), countdown=600)

    assert new.outcome == "replaced"
    assert [header.get("outcome") or "" for header in place.headers()] == ["", "replaced"]
    [(task_id, task)] = place.tasks().items()
    assert (task_id, task.eta > 0) == (new.id, True)
    assert old.state == "REVOKED"
    assert place.pushed == 2


def test_a_member_of_a_group_joins_the_holder_in_the_act(place, place_at):
    other = place_at(place.app.conf.broker_url, task_default_queue=place.queue)
    first = place.task.delay(1)

    [member] = group([other.task.s(1)]).apply_async().results

    assert (other.pushed, len(place.messages())) == (1, 1)
    assert followers(place) == [(member.id, first.id)]


def followers(place: Place) -> list[tuple[str, str]]:
    return [
        (task_id, follower.holder)
        for key, _ in place.store.walk()
        for task_id, follower in place.store.followers(key)
    ]


def test_calls_of_apply_many_are_one_exchange(place):
    begun = []
    begin = place.store.begin_publish
    place.store.begin_publish = lambda pushes: begun.append(len(pushes)) or begin(pushes)

    results = apply_many([place.task.s(n % 40) for n in range(50)])

    assert [result.outcome for result in results] == ["created"] * 40 + ["deduplicated"] * 10
    assert begun == [50]
    assert [message["headers"]["id"] for message in place.messages()] == [
        result.id for result in results[:40]
    ]


def test_a_call_of_apply_many_that_is_routed_to_no_queue_leaves_the_others_their_locks(place):
    lost = place.task.s(1).set(exchange=Exchange("nowhere", type="direct"), routing_key="unbound")

    results = apply_many([lost, place.task.s(2), lost.clone(args=(3,)), place.task.s(4)])

    assert [result.outcome for result in results] == ["bypassed", "created"] * 2
    assert set(place.tasks()) == {results[1].id, results[3].id}
    assert len(place.messages()) == 2


def test_a_long_message_of_apply_many_replaces_the_call_in_front_of_it(place):
    """It takes two steps, and must not overtake calls that are pushed together."""
    latest = define(
        place.app, "shop.latest", unique=True, unique_on="shop_id", unique_on_conflict="replace"
    )

    results = apply_many(
        [latest.s(1, "old"), latest.s(1, "x" * LONGEST_TEXT), latest.s(2, "other")]
    )

    assert [result.outcome for result in results] == ["created", "replaced", "created"]
    assert set(place.tasks()) == {results[1].id, results[2].id}
    assert [message["headers"]["id"] for message in place.messages()] == [r.id for r in results]


def test_a_long_message_of_apply_many_that_is_a_duplicate_is_not_published(place):
    place.task.delay("x" * LONGEST_TEXT)
    rejecting = place.task.s("x" * LONGEST_TEXT).set(unique_on_conflict="reject")

    results = apply_many([place.task.s(1), place.task.s("x" * LONGEST_TEXT), rejecting])

    assert [result.outcome for result in results[:2]] == ["created", "deduplicated"]
    assert isinstance(results[2], DuplicateTask)
    assert len(place.messages()) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_long_message_of_apply_many_that_cannot_be_pushed_leaves_no_lock(
    place, monkeypatch, number
):
    place.task.delay(0)
    calls = [place.task.s(1), place.task.s("x" * LONGEST_TEXT), place.task.s(2)][1 - number :]

    def refused(*_: Any) -> Any:
        raise redis.ResponseError("OOM command not allowed")

    monkeypatch.setattr(redis.Redis, "lpush", refused)
    with pytest.raises(BatchInterrupted if number else OperationalError) as caught:
        apply_many(calls)

    assert len(place.tasks()) == 1 + number == len(place.messages())
    results = getattr(caught.value, "results", [None, None])
    assert [result is not None for result in results] == [True, False, False][1 - number :]


def test_the_result_is_a_child_of_the_task_that_called(place):
    inner = place.task

    @place.app.task(name="shop.outer", shared=False, bind=True)
    def outer(self: Any) -> list[str]:
        inner.delay(1)
        inner.delay(1)
        return [child.id for child in self.request.children]

    with working(place.app):
        children = outer.delay().get(timeout=20)

    assert len(children) == 2
    assert children[0] == children[1]


def test_a_worker_runs_what_the_store_has_pushed(place):
    with working(place.app):
        results = [place.task.delay(n) for n in range(20)]
        for result in results:
            result.get(timeout=20)
        eventually(lambda: not place.tasks())

    assert place.pushed == 20


@pytest.mark.parametrize(("length", "fused"), [(1, 1), (LONGEST_TEXT, 0)])
def test_a_long_result_is_written_by_the_backend(place, monkeypatch, length, fused):
    """The release comes first, as always where both are not one act."""

    def text() -> str:
        return "x" * length

    report = define(place.app, "shop.report", function=text, unique=True)
    finished = []
    finish = type(place.store).finish_with_result

    def finish_with_result(store: Any, *arguments: Any) -> Any:
        finished.append(arguments)
        return finish(store, *arguments)

    monkeypatch.setattr(type(place.store), "finish_with_result", finish_with_result)
    with working(place.app):
        result = report.delay()
        assert result.get(timeout=20) == "x" * length
        assert report.delay().outcome == "created"
        eventually(lambda: not place.tasks())

    assert bool(finished) == bool(fused)
    assert result.unique.duplicates == 0


def test_threads_admit_each_key_once(place):
    results: list[Any] = []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        results.extend(place.task.delay(n) for n in range(100))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(result.outcome == "created" for result in results) == 100
    assert len({message["headers"]["id"] for message in place.messages()}) == 100
    assert len(place.messages()) == 100


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"global_keyprefix": "shop:"}, "shop:{queue}"),
        ({"queue_order_strategy": "priority", "priority_steps": [0, 5, 9]}, "{queue}\x06\x165"),
    ],
)
def test_the_message_is_in_the_list_that_kombu_reads(place_at, redis_url, options, name):
    place = place_at(redis_url, broker_transport_options=options)

    result = place.task.apply_async((1,), priority=5 if "priority_steps" in options else None)

    assert place.pushed == 1
    queue = name.format(queue=place.queue)
    assert [message["headers"]["id"] for message in place.messages(queue)] == [result.id]
    with working(place.app):
        result.get(timeout=20)


@pytest.fixture(params=["TLS", "unix socket"])
def private_url(request, tls_redis_server, start_server) -> str:
    """Of a server that is reached otherwise than by plain TCP, and of no other test."""
    if request.param == "TLS":
        options = {**tls_redis_server.tls_options(), "ssl_cert_reqs": "required"}
        return f"rediss://127.0.0.1:{tls_redis_server.port}/7?{urlencode(options)}"
    server = start_server(RedisServer, extra_args=("--unixsocket", "redis.sock"))
    return f"redis+socket://{server.directory}/redis.sock?virtual_host=2"


def test_tls_and_unix_sockets(place_at, private_url):
    place = place_at(private_url)

    first = place.task.delay(1)

    assert place.task.delay(1).id == first.id
    assert (place.pushed, [task.pending for task in place.tasks().values()]) == (1, [False])
    with working(place.app):
        first.get(timeout=20)
        eventually(lambda: not place.tasks())


# -- both ways ---------------------------------------------------------------------------


def both_ways(place: Place) -> dict[str, Any]:
    """What calls get that replace, run again, follow, wait for an ETA, or are made together."""
    options = {"unique": True, "unique_on": "shop_id"}
    latest = define(place.app, "shop.latest", **options, unique_on_conflict="replace")
    rerun = define(place.app, "shop.rerun", **options, unique_on_conflict="rerun")
    seen: dict[str, Any] = {}
    results = [latest.apply_async((1, full), countdown=600) for full in (False, True)]
    seen["replace"] = [result.outcome for result in results], results[0].state
    running = rerun.delay(1)
    start = Start(running.id, "here/1/boot/1", "shop.rerun", 60_000, 60_000)
    place.store.flush()
    place.store.start(running.unique_key, start)
    results = [rerun.delay(1, True), rerun.delay(1, False)]
    seen["rerun"] = [(result.outcome, result.holder_state) for result in results]
    later = place.task.apply_async((2,), countdown=600)
    place.store.flush()
    seen["ETA"] = later.outcome, place.task.delay(2).holder_state, place.tasks()[later.id].eta > 0
    holder = place.task.delay(3)
    [member] = group([place.task.s(3)]).apply_async().results
    seen["followers"] = [found == (member.id, holder.id) for found in followers(place)]
    batch = apply_many([place.task.s(shop) for shop in (4, 5, 4, 3)])
    seen["apply_many"] = [result.outcome for result in batch]
    place.store.flush()
    seen["messages"] = [message["headers"]["task"] for message in place.messages()]
    seen["headers"] = [header.get("outcome") or "" for header in place.headers()]
    seen["tasks"] = sorted((task.task_name, str(task.state)) for task in place.tasks().values())
    return seen


def test_both_ways_give_calls_the_same(place_at, redis_server):
    one_act = place_at(redis_server.fresh_url())
    two_steps = place_at(redis_server.fresh_url(), unique_atomic_publish=False)

    assert both_ways(one_act) == both_ways(two_steps)
    assert (one_act.pushed > 8, two_steps.pushed) == (True, 0)


# -- two steps ---------------------------------------------------------------------------


def _expecting_two_steps(place: Place, call: Callable[[], Any]) -> Any:
    before = place.pushed
    result = call()
    assert place.pushed == before
    place.store.flush()
    return result


@pytest.mark.parametrize(
    ("conf", "reason"),
    [
        ({"unique_atomic_publish": False}, "unique_atomic_publish is False"),
        ({"task_send_sent_event": True}, "task_send_sent_event is on"),
    ],
)
def test_settings_that_keep_two_steps(place_at, redis_url, conf, reason):
    place = place_at(redis_url, **conf)

    first = _expecting_two_steps(place, lambda: place.task.delay(1))

    assert place.task.delay(1).id == first.id
    state = state_of(place.app)
    assert why_two_steps(place.app, state.settings, state.store) == reason
    declared = manifest(place.app)["capabilities"]["atomic_publish"]
    assert declared == {"used": False, "reason": reason}


def test_the_manifest_shows_one_act(place):
    declared = manifest(place.app)["capabilities"]["atomic_publish"]
    assert declared == {"used": True, "reason": ""}


def test_another_database_is_another_place(place_at, redis_server):
    place = place_at(redis_server.fresh_url(), unique_store_url=redis_server.fresh_url())

    first = _expecting_two_steps(place, lambda: place.task.delay(1))

    assert place.task.delay(1).id == first.id
    assert len(place.messages()) == 1


def test_another_user_may_lack_rights_on_the_queue(place_at, redis_server):
    url = redis_server.fresh_url()
    with redis_server.client() as client:
        rights: Any = {"keys": ["cu:*"], "categories": ["+@all"]}
        client.acl_setuser("locks", enabled=True, passwords=["+secret"], **rights)
    place = place_at(url, unique_store_url=url.replace("redis://", "redis://locks:secret@"))

    first = _expecting_two_steps(place, lambda: place.task.delay(1))

    assert place.task.delay(1).id == first.id
    assert len(place.messages()) == 1


def test_a_memory_broker_keeps_two_steps(redis_url):
    app = make_app(redis_url)
    task = define(app, unique=True)

    assert task.delay(1).outcome == "created"
    assert task.delay(1).outcome == "deduplicated"


def test_a_call_with_a_connection_to_another_broker(place):
    with Connection("memory://") as connection:
        first = _expecting_two_steps(
            place, lambda: place.task.apply_async((1,), connection=connection)
        )

    assert place.messages() == []
    assert place.task.delay(1).id == first.id


def test_a_message_for_several_queues(place_at, redis_url):
    exchange = Exchange("shop", type="topic")
    keys = {"first": "shop.#", "second": "#"}
    queues = [Queue(name, exchange, routing_key=key) for name, key in keys.items()]
    place = place_at(redis_url, task_queues=queues)

    with place.app.producer_or_acquire() as producer:
        for queue in queues:
            queue.bind(producer.channel).declare()

    def call() -> Any:
        return place.task.apply_async((1,), exchange=exchange, routing_key="shop.new")

    first = _expecting_two_steps(place, call)

    for queue in ("first", "second"):
        [message] = place.messages(queue)
        assert message["headers"][HEADER]["at"] > 0
    assert call().id == first.id
    assert [len(place.messages(queue)) for queue in ("first", "second")] == [1, 1]
    assert [task.pending for task in place.tasks().values()] == [False]


def test_a_long_message(place):
    def call() -> Any:
        return place.task.delay("x" * LONGEST_TEXT)

    first = _expecting_two_steps(place, call)

    assert call().id == first.id
    [message] = place.messages()
    assert message["headers"][HEADER]["at"] > 0


@pytest.mark.skipif(kombu.VERSION[:2] < (5, 7), reason="kombu expires queues since 5.7")
def test_a_queue_that_expires(place_at, redis_url):
    """kombu extends its expiry with each message."""
    queue = Queue("short-lived", Exchange(""), "short-lived", expires=600)
    place = place_at(redis_url, task_queues=[queue], task_default_queue="short-lived")

    first = _expecting_two_steps(place, lambda: place.task.delay(1))

    assert place.task.delay(1).id == first.id
    assert len(place.messages()) == 1
    assert 0 < place.redis.pttl("short-lived") <= 600_000


def test_kombu_repeats_the_second_of_two_steps(place, monkeypatch):
    """The connection to the broker breaks between the acquire and the push."""
    lpush, failures = redis.Redis.lpush, [ConnectionError("reset by peer")]

    def broken_once(client: Any, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return lpush(client, *arguments)

    monkeypatch.setattr(redis.Redis, "lpush", broken_once)
    result = _expecting_two_steps(place, lambda: place.task.delay("x" * LONGEST_TEXT))

    assert (result.outcome, failures) == ("created", [])
    assert [message["headers"]["id"] for message in place.messages()] == [result.id]
    assert [(i, task.pending) for i, task in place.tasks().items()] == [(result.id, False)]


@contextmanager
def receiver_of(signal: Any) -> Iterator[list[str]]:
    sent: list[str] = []

    def receiver(headers: dict[str, Any] | None = None, **_: Any) -> None:
        sent.append((headers or {}).get("id", ""))

    signal.connect(receiver)
    yield sent
    signal.disconnect(receiver)


@pytest.mark.parametrize("signal", [signals.before_task_publish, signals.after_task_publish])
def test_receivers_of_a_publish_see_published_calls_only(place, signal):
    with receiver_of(signal) as sent:
        first = _expecting_two_steps(place, lambda: place.task.delay(1))
        place.task.delay(1)

    assert sent == [first.id]


def test_a_copy_of_the_header_in_another_one_is_left_out(place):
    """As Sentry copies them: into the header that is named ``headers``."""
    send = place.app.amqp.send_task_message

    def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
        options["headers"] = {**options["headers"], "headers": dict(options["headers"], trace="t")}
        return send(producer, name, message, **options)

    place.app.amqp.send_task_message = send_task_message
    result = place.task.delay("a", 1)

    [message] = place.messages()
    assert place.pushed == 1
    assert message["headers"]["headers"] == {"trace": "t"}
    assert isinstance(message["headers"][HEADER]["at"], int)
    assert message["headers"][HEADER]["id"] == result.id


def test_a_policy_that_changes_the_eta(place):
    late = define(
        place.app,
        "shop.late",
        unique=True,
        unique_on="shop_id",
        unique_on_conflict="replace",
        unique_max_wait=60,
    )

    _expecting_two_steps(place, lambda: late.apply_async((1,), countdown=10))


def test_a_broker_that_was_failed_over_to(place_at, redis_server, start_server):
    """Locks stay in the first server of the list, which is away: calls raise, or publish."""
    other = start_server(RedisServer)
    first = start_server(RedisServer)
    place = place_at(f"{first.url};{other.url}", backend=other.url, unique_store_url=first.url)
    place.task.delay(1)
    assert place.pushed == 1
    first.stop()

    with pytest.raises(StoreUnavailable):
        place.task.delay(2)
    place.app.conf.unique_on_store_error = "publish"
    place.task.delay(3)

    with other.client() as client:
        [text] = client.lrange(place.queue, 0, -1)
    assert json.loads(text)["headers"][HEADER]["outcome"] == "bypassed"


def test_a_channel_of_the_users_own(place, monkeypatch):
    """It pushes by itself: the call is made without a lock, once, and it is reported."""

    def put(channel: Any, queue: str, message: dict[str, Any], **_: Any) -> None:
        message["headers"] = dict(message["headers"])
        with channel.conn_or_acquire() as client:
            client.lpush(queue, json.dumps(message))

    coordinator = state_of(place.app).part(UniqueTaskCoordinator)
    assert coordinator.atomic is not None
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "_put", put)
        assert place.task.delay(1).outcome == "bypassed"
    assert coordinator.atomic is None
    assert place.task.delay(1).outcome == "created"


def test_a_message_that_is_routed_to_no_queue(place):
    """Nothing would release its lock: the call has none, and that is reported."""
    nowhere = Exchange("nowhere", type="direct")

    result = place.task.apply_async((1,), exchange=nowhere, routing_key="unbound")

    assert (result.outcome, place.tasks(), place.messages()) == ("bypassed", {}, [])
    assert place.task.delay(1).outcome == "created"


# -- failures ----------------------------------------------------------------------------


def test_a_queue_of_another_type_refuses_the_call(place):
    place.task.delay(0)  # kombu has declared the queue
    place.redis.delete(place.queue)
    place.redis.set(place.queue, "not a list")

    for shop in (1, 2):
        with pytest.raises(StoreUnavailable, match=place.queue):
            place.task.delay(shop)

    # Neither a lock nor a mark, and calls to other queues go on.
    assert len(list(place.store.walk())) == 1
    assert place.task.apply_async((3,), queue=f"{place.queue}-other").outcome == "created"


def run_all(place: Place) -> list[Any]:
    """The first argument of every task that a worker runs until none is left."""
    ran: list[Any] = []

    def receiver(args: Any = (), **_: Any) -> None:
        ran.append(args[0])

    signals.task_prerun.connect(receiver)
    with working(place.app):
        eventually(lambda: not place.tasks() and not place.messages())
    signals.task_prerun.disconnect(receiver)
    return ran


def through(proxy: TcpProxy, place_at: Any, redis_server: RedisServer, **conf: Any) -> Place:
    """A place whose every connection passes the proxy, warmed up."""
    url = proxy.url_of(redis_server.fresh_url())
    place: Place = place_at(url, **{"unique_store_timeout": 0.3, **conf})
    place.redis = redis_server.client(int(url.rpartition("/")[2]))
    place.task.delay("warm")
    return place


@contextmanager
def stalled_replies(place: Place, proxy: TcpProxy) -> Iterator[None]:
    """The store receives the act, and its reply is held back."""
    begin = place.store.begin_publish

    def begin_publish(pushes: Any) -> Any:
        proxy.stall_replies()
        return begin(pushes)

    place.store.begin_publish = begin_publish
    try:
        yield
    finally:
        place.store.begin_publish = begin
        proxy.restore()


def test_a_call_without_a_reply_is_withdrawn(proxy, place_at, redis_server):
    place = through(proxy, place_at, redis_server)

    with stalled_replies(place, proxy), pytest.raises(StoreUnavailable, match="in time"):
        place.task.delay(1)

    def withdrawn() -> bool:
        marks = [mark for _, record in place.store.walk() for mark in record.marks.values()]
        return any(mark.kind == "withdrawn" for mark in marks)

    eventually(withdrawn)
    assert len(place.messages()) == 2  # it was pushed, and the gate drops it
    assert place.task.delay(1).outcome == "created"
    ran = run_all(place)
    assert sorted(map(str, ran)) == ["1", "warm"]


EXITS = """
    import sys
    from celery_unique import StoreUnavailable
    from celery_unique.config.app_state import state_of
    from tests.support.app import define, make_app

    app = make_app(broker=sys.argv[1], backend=sys.argv[1], task_default_queue=sys.argv[2])
    task = define(app, unique=True)
    store = state_of(app).store
    begin = store.begin_publish

    def begin_publish(pushes):
        begin(pushes)()

        def receive():
            raise StoreUnavailable("no reply")

        return receive

    store.begin_publish = begin_publish
    try:
        task.delay(1)
    except StoreUnavailable:
        sys.exit(3)
"""


def test_a_call_without_a_reply_is_withdrawn_when_its_process_ends(place):
    command = [sys.executable, "-c", textwrap.dedent(EXITS), place.app.conf.broker_url, place.queue]

    ended = subprocess.run(command, cwd=REPOSITORY, timeout=60)

    assert ended.returncode == 3
    assert (len(place.messages()), place.tasks()) == (1, {})


def test_a_replacement_without_a_reply_is_not_withdrawn(proxy, place_at, redis_server, caplog):
    """What it has replaced is gone: one of them must run."""
    place = through(proxy, place_at, redis_server)
    latest = define(
        place.app, "shop.latest", unique=True, unique_on="shop_id", unique_on_conflict="replace"
    )
    latest.apply_async((1,), countdown=600)

    with stalled_replies(place, proxy), pytest.raises(StoreUnavailable, match="in time"):
        latest.apply_async((1, True), countdown=600)

    eventually(lambda: "cannot withdraw shop.latest" in caplog.text)
    waiting = [task for task in place.tasks().values() if task.task_name == "shop.latest"]
    assert len(waiting) == 1


def test_a_call_that_is_published_without_a_reply_may_exist_twice(proxy, place_at, redis_server):
    place = through(proxy, place_at, redis_server, unique_on_store_error="publish")

    with stalled_replies(place, proxy):
        begin = place.store.begin_publish

        def begin_publish(pushes: Any) -> Any:
            wait = begin(pushes)

            def receive() -> Any:
                try:
                    return wait()
                finally:
                    proxy.restore()

            return receive

        place.store.begin_publish = begin_publish
        result = place.task.delay(1)

    assert result.outcome == "bypassed"
    copies = [m["headers"][HEADER] for m in place.messages() if m["headers"]["id"] == result.id]
    assert [header.get("copies", False) for header in copies] == [False, True]
    eventually(lambda: place.tasks()[result.id].copies)
    ran = run_all(place)
    assert ran.count(1) == 1


def test_a_lost_reply_is_asked_for_again(proxy, place_at, redis_server):
    place = through(proxy, place_at, redis_server, unique_store_timeout=5)
    begin = place.store.begin_publish

    def begin_publish(pushes: Any) -> Any:
        proxy.stall_replies()
        wait = begin(pushes)
        eventually(lambda: len(place.messages()) == 2)
        proxy.cut()
        proxy.restore()
        return wait

    place.store.begin_publish = begin_publish
    result = place.task.delay(1)

    assert result.outcome == "created"
    assert [m["headers"]["id"] for m in place.messages()].count(result.id) == 1


def test_an_interrupted_call_is_withdrawn(place, monkeypatch):
    """As by a time limit of the task that calls, between the push and the reply."""

    class Interrupted(BaseException): ...

    begin = place.store.begin_publish

    def begin_publish(pushes: Any) -> Any:
        begin(pushes)()

        def receive() -> Any:
            raise Interrupted

        return receive

    monkeypatch.setattr(place.store, "begin_publish", begin_publish)
    with pytest.raises(Interrupted):
        place.task.delay(1)
    monkeypatch.undo()

    eventually(lambda: not place.tasks())
    assert place.task.delay(1).outcome == "created"
