"""Redis when it is slow, gone, back again, or shared by threads and processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import redis

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.base import Finish
from celery_unique.stores.record import State
from celery_unique.stores.redis import RedisStore, commands, connections
from celery_unique.stores.redis.connections import MOST_IDLE
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    run,
    running,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S, after_all, unavailable_within
from tests.support import RedisServer, eventually
from tests.support.interrupts import Interruption, named, of_package
from tests.support.server import HOST, free_port

TIMEOUT_S = 0.4
#: What a test run on a busy machine may add to a time-out.
SLACK_S = 0.6


@pytest.fixture(params=["redis_url", "valkey_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    with closing(RedisStore.from_url(url, timeout_s=PATIENCE_S)) as store:
        yield store


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as client:
        yield client


# -- fire-and-forget acts -------------------------------------------------------------


@pytest.mark.server
def test_flush_waits_for_everything_sent_before(store):
    keys = [fresh_key() for _ in range(1000)]
    store.acquire_many([(key, claim("a")) for key in keys])

    for key in keys:
        store.confirm(key, "a", QUEUE_LEASE)
    store.flush()

    assert {record.tasks["a"].state for _, record in store.walk()} == {"w"}


@pytest.mark.server
def test_a_process_finds_what_it_has_told_the_store_one_way(store):
    """Waiting, just being sent by the thread, or carried out: in any of these moments."""
    store.acquire(fresh_key(), claim("warm"))
    for number in range(300):
        key = fresh_key()
        store.acquire(key, claim("a"))
        store.confirm(key, "a", QUEUE_LEASE)
        time.sleep(number % 20 / 10_000)  # up to 2 ms, and the thread waits for one

        assert task_of(store, key, "a").state == "w"


@pytest.mark.server
def test_a_row_of_replacements_by_one_process_replaces_one_at_a_time(store, key):
    """Unconfirmed, each would also stand in for all that were replaced before it."""
    publish(store, key, "0")
    for number in range(1, 200):
        acquired = store.acquire(key, claim(f"{number}", on_conflict="replace"))
        store.confirm(key, f"{number}", QUEUE_LEASE)

        assert acquired.replaced == (f"{number - 1}",)


@pytest.mark.server
def test_a_one_way_act_that_was_taken_along_in_vain_is_not_lost(
    redis_url, start_proxy, redis_server
):
    proxy = start_proxy(redis_server.port)
    # What is cut is refused at once: nobody waits for the time-out here.
    with closing(RedisStore.from_url(proxy.url_of(redis_url), timeout_s=PATIENCE_S)) as store:
        keys = [fresh_key() for _ in range(20)]
        store.acquire_many([(key, claim("a")) for key in keys])
        proxy.cut()
        for key in keys:
            store.confirm(key, "a", QUEUE_LEASE)
            with suppress(StoreUnavailable):
                store.read(key)
        proxy.restore()

        for key in keys:
            eventually(
                lambda key=key: task_of(store, key, "a").state == "w",
                timeout=20,
                ignoring=StoreUnavailable,
            )


@pytest.mark.server
def test_a_one_way_act_that_is_taken_along_survives_a_script_flush(store, client, key):
    store.acquire(key, claim("a"))
    store.confirm(key, "a", QUEUE_LEASE)
    client.script_flush()

    store.read(key)
    store.flush()

    assert task_of(store, key, "a").state == "w"


@pytest.mark.server
def test_a_one_way_act_that_is_always_taken_along_brings_its_script(store, client, key):
    """Somebody who asks and asks leaves the thread nothing to send."""
    store.acquire(key, claim("a"))
    store.confirm(key, "a", QUEUE_LEASE)
    client.script_flush()

    states = [task_of(store, key, "a").state for _ in range(3)]

    assert states[-1] == "w"


@pytest.mark.server
@pytest.mark.parametrize("way", ["asked", "fire-and-forget"])
def test_a_script_that_is_not_known_is_sent_once_for_many_acts(store, client, way):
    claims = [(fresh_key(), claim("a")) for _ in range(1200)]
    if way == "fire-and-forget":
        store.acquire_many(claims)
    before = received(client)
    client.script_flush()

    if way == "asked":
        outcomes = {each.outcome for each in store.acquire_many(claims)}
    else:
        store.confirm_many([(key, "a", QUEUE_LEASE) for key, _ in claims])
        store.flush()
        outcomes = {task_of(store, key, "a").state for key, _ in claims[:50]}

    assert outcomes == ({"created"} if way == "asked" else {"w"})
    assert (received(client) - before) / len(claims) < 1500  # the script has thousands


def received(client: redis.Redis) -> int:
    found: Any = client.info("stats")
    return int(found["total_net_input_bytes"])


@pytest.mark.server
def test_flush_without_anything_sent_connects_to_nothing():
    RedisStore.from_url(f"redis://{HOST}:{free_port()}").flush()


@pytest.mark.server
def test_a_one_way_act_notices_that_the_server_was_restarted(start_server, key):
    server = start_server(RedisServer, append_only=True)
    with closing(RedisStore.from_url(server.url, timeout_s=PATIENCE_S)) as store:
        publish(store, fresh_key(), "warm")
        store.acquire(key, claim("a"))
        server.restart()

        store.confirm(key, "a", QUEUE_LEASE)
        store.flush()

        assert task_of(store, key, "a").state == "w"


@pytest.mark.server
def test_nobody_waits_for_a_stalled_server_with_a_one_way_act(
    redis_url, start_proxy, redis_server, key
):
    proxy = start_proxy(redis_server.port)
    with closing(RedisStore.from_url(proxy.url_of(redis_url), timeout_s=PATIENCE_S)) as store:
        publish(store, fresh_key(), "warm")
        store.acquire(key, claim("a"))
        store.flush()
        proxy.stall()

        begun = time.monotonic()
        for number in range(1_000):
            store.settle("1:00", Finish(f"{number}", "d1", State.COMPLETED, 0, 0), False)
        store.confirm(key, "a", QUEUE_LEASE)
        took = time.monotonic() - begun
        proxy.restore()

        eventually(lambda: task_of(store, key, "a").state == "w", timeout=20)
    assert took < PATIENCE_S / 2  # whoever waits does so for the whole of it


@pytest.mark.server
@pytest.mark.parametrize("half", ["replies", "requests"])
def test_a_one_way_act_that_met_a_cut_connection_is_sent_again(
    redis_url, start_proxy, redis_server, half
):
    """Written into a connection that was just being cut it would be lost, and nobody told."""
    proxy = start_proxy(redis_server.port)
    keys = [fresh_key() for _ in range(200)]
    with closing(RedisStore.from_url(proxy.url_of(redis_url), timeout_s=PATIENCE_S)) as store:
        store.acquire_many([(key, claim("a")) for key in keys])
        for number, key in enumerate(keys):
            if number % 20 == 10:
                if half == "replies":
                    proxy.stall_replies()
                proxy.cut()
                proxy.restore()
            store.confirm(key, "a", QUEUE_LEASE)
            time.sleep(0.002)  # or all would be sent together
        store.flush()

        states = {record.tasks["a"].state for _, record in store.walk()}

    assert states == {"w"}


@pytest.mark.server
def test_one_way_acts_wait_for_a_server_that_is_away_and_say_so(start_server, key, caplog):
    server = start_server(RedisServer, append_only=True)
    with closing(RedisStore.from_url(server.url, timeout_s=PATIENCE_S)) as store:
        store.acquire(key, claim("a"))
        server.kill()

        store.confirm(key, "a", QUEUE_LEASE)
        eventually(lambda: "fire-and-forget acts wait for" in caplog.text)
        server.restart()

        eventually(
            lambda: task_of(store, key, "a").state == "w", timeout=20, ignoring=StoreUnavailable
        )


@pytest.mark.server
@pytest.mark.parametrize("taken_along_by", ["read", "acquire", "two steps"])
def test_an_interrupted_act_loses_no_one_way_act_that_it_took_along(
    redis_url, monkeypatch, taken_along_by
):
    """A lost confirmation lets a lock lapse, a lost end keeps a key taken."""
    acts: dict[str, Callable[[RedisStore, str], Any]] = {
        "read": lambda store, key: store.read(key),
        "acquire": lambda store, key: store.acquire(fresh_key(), claim("other")),
        "two steps": lambda store, key: store.begin_acquire_many([(fresh_key(), claim("other"))])(),
    }
    # By no thread: what waits is taken along, or lost.
    monkeypatch.setattr(commands.WriteBehindBuffer, "_wake", lambda self: None)
    with closing(RedisStore.from_url(redis_url, timeout_s=PATIENCE_S)) as store:
        interruption = Interruption(of_package)

        def confirmed() -> str:
            key = fresh_key()
            store.acquire(key, claim("a"))
            store.confirm(key, "a", QUEUE_LEASE)
            return key

        key = confirmed()
        points = interruption.points(lambda: acts[taken_along_by](store, key))
        lost = []
        for at, point in enumerate(points):
            key = confirmed()
            interruption.interrupt(
                at, KeyboardInterrupt(), lambda key=key: acts[taken_along_by](store, key)
            )
            if task_of(store, key, "a").state != "w":
                lost.append(named(point))

    assert len(points) > 20
    assert lost == []


@pytest.mark.server
def test_a_flush_waits_for_acts_that_another_thread_takes_along(redis_url, monkeypatch):
    monkeypatch.setattr(commands.WriteBehindBuffer, "_wake", lambda self: None)
    with closing(RedisStore.from_url(redis_url, timeout_s=PATIENCE_S)) as store:
        key = fresh_key()
        store.acquire(key, claim("a"))
        store.confirm(key, "a", QUEUE_LEASE)
        with ThreadPoolExecutor(1) as other:
            receive = other.submit(store.begin_acquire_many, [(key, claim("b"))]).result()

            with pytest.raises(StoreUnavailable, match="another thread"):
                store.flush(0.05)
            other.submit(
                store.flush, PATIENCE_S
            ).result()  # its own reply is the next thing it reads
            flushed = other.submit(receive)
            store.flush()

            assert task_of(store, key, "a").state == "w"
            flushed.result()


@pytest.mark.server
def test_an_interrupted_flush_does_not_stop_the_thread_of_one_way_acts(redis_url):
    def watched(frame: FrameType) -> bool:
        return of_package(frame) or frame.f_code.co_filename == threading.__file__

    with closing(RedisStore.from_url(redis_url, timeout_s=PATIENCE_S)) as store:
        interruption = Interruption(watched)
        publish(store, fresh_key(), "a")
        points = interruption.points(store.flush)
        for at in range(len(points)):
            interruption.interrupt(at, KeyboardInterrupt(), store.flush)
            key = fresh_key()
            store.acquire(key, claim("a"))
            store.confirm(key, "a", QUEUE_LEASE)
            over: list[bool] = []
            other = threading.Thread(
                target=lambda over=over: (store.flush(), over.append(True)), daemon=True
            )
            other.start()
            other.join(20)
            assert over, f"interrupted at {named(points[at])}"


def test_a_closed_store_tries_no_more(caplog):
    store = RedisStore.from_url(f"redis://{HOST}:{free_port()}", timeout_s=0.2)
    store.confirm("1:00", "a", QUEUE_LEASE)

    store.close()

    eventually(lambda: "fire-and-forget act on the lock store failed" in caplog.text)


# -- time-outs and errors -----------------------------------------------------


@contextmanager
def black_hole() -> Iterator[int]:
    """A port that accepts and never answers."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


ACTS: dict[str, Callable[[RedisStore], Any]] = {
    "acquire": lambda store: store.acquire("1:00", claim("a")),
    "renew": lambda store: store.renew([running("1:00", "a")]),
    "read": lambda store: store.read("1:00"),
    "walk": lambda store: list(store.walk()),
    "ping": lambda store: store.ping(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("credentials", ["", "user:secret@"])
def test_a_refused_port_is_told_at_once(act, credentials):
    port = free_port()
    store = RedisStore.from_url(f"redis://{credentials}{HOST}:{port}/3", timeout_s=TIMEOUT_S)

    error = unavailable_within(TIMEOUT_S + SLACK_S, lambda: ACTS[act](store))

    assert error.store == f"{HOST}:{port}/3"
    assert f"Redis at {HOST}:{port}/3, cannot be reached" in str(error)
    assert ".." not in str(error)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("database", [0, 3])
def test_a_server_that_never_answers_is_given_up_within_the_time_out(act, database):
    with black_hole() as port:
        store = RedisStore.from_url(f"redis://{HOST}:{port}/{database}", timeout_s=TIMEOUT_S)

        unavailable_within(TIMEOUT_S + SLACK_S, lambda: ACTS[act](store), match="in time")


@pytest.mark.server
def test_a_frozen_server_is_given_up_within_the_time_out(start_server, key):
    server = start_server(RedisServer)
    store = RedisStore.from_url(server.url, timeout_s=TIMEOUT_S)
    after_all(lambda: store.acquire(key, claim("a")))
    server.sigstop()

    begun = time.monotonic()
    unavailable_within(TIMEOUT_S + SLACK_S, lambda: store.acquire(key, claim("b")), match="in time")
    took = time.monotonic() - begun
    server.sigcont()

    assert took > TIMEOUT_S * 0.9
    assert after_all(lambda: store.acquire(key, claim("b")).outcome) == "duplicate"


@pytest.mark.server
def test_a_restarted_server_is_used_again_without_an_error(start_server, key):
    server = start_server(RedisServer, append_only=True)
    store = RedisStore.from_url(server.url, timeout_s=PATIENCE_S)
    store.acquire(key, claim("a"))
    server.restart()

    duplicate = store.acquire(key, claim("b"))

    assert duplicate.holder is not None
    assert duplicate.holder.task_id == "a"


@pytest.mark.server
def test_a_killed_server_is_told_and_its_return_is_noticed(start_server, key):
    server = start_server(RedisServer, append_only=True)
    store = RedisStore.from_url(server.url, timeout_s=PATIENCE_S)
    publish(store, key, "a")
    server.kill()

    with pytest.raises(StoreUnavailable):
        store.acquire(key, claim("b"))
    server.restart()

    assert store.acquire(key, claim("b")).outcome == "duplicate"
    store.confirm(key, "a", QUEUE_LEASE)
    store.flush()


PASSWORD = "s3cret/of the:shop"


@pytest.mark.server
def test_a_password_is_used_and_never_told(start_server, key):
    server = start_server(RedisServer)
    with server.client() as admin:
        admin.acl_setuser(
            "shop", enabled=True, passwords=f"+{PASSWORD}", keys="*", commands=["+@all"]
        )
        admin.acl_setuser("default", enabled=False)
    quoted = PASSWORD.replace("/", "%2F").replace(" ", "%20").replace(":", "%3A")
    place = f"{HOST}:{server.port}/1"

    right = RedisStore.from_url(f"redis://shop:{quoted}@{place}", timeout_s=PATIENCE_S)
    publish(right, key, "a")
    errors = []
    for credentials in (f"shop:{quoted}x@", f"wrong:{quoted}@", ""):
        store = RedisStore.from_url(f"redis://{credentials}{place}", timeout_s=PATIENCE_S)
        with pytest.raises(StoreUnavailable, match="refused: ") as caught:
            store.acquire(key, claim("b"))
        errors.append(caught.value)

    assert task_of(right, key, "a").state == "w"
    for error in errors:
        told = f"{error} {error!r} {error.to_ojs()} {error.store}"
        assert PASSWORD not in told
        assert quoted not in told
    assert PASSWORD not in repr(right)
    assert right.fingerprint() == RedisStore.from_url(f"redis://{place}").fingerprint()


@pytest.mark.server
def test_what_the_server_says_is_passed_on(start_server, key):
    server = start_server(RedisServer)
    store = RedisStore.from_url(server.url, timeout_s=PATIENCE_S)
    store.acquire(key, claim("a"))
    with server.client() as admin:
        [name] = admin.keys()
        admin.set(name, "not a hash")
        with pytest.raises(StoreUnavailable, match="wrong kind of value"):
            store.acquire(key, claim("b"))
        with pytest.raises(StoreUnavailable, match="wrong kind of value"):
            store.read(key)

        admin.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            store.acquire(fresh_key(), claim("a"))
        admin.config_set("maxmemory", 0)

        admin.replicaof(HOST, free_port())
        with pytest.raises(StoreUnavailable, match="read only replica"):
            store.acquire(fresh_key(), claim("a"))
        admin.replicaof("no", "one")

    assert store.acquire(fresh_key(), claim("a")).outcome == "created"


@pytest.mark.server
def test_a_database_that_is_not_there_is_told(redis_server):
    store = RedisStore.from_url(f"redis://{HOST}:{redis_server.port}/99999", timeout_s=PATIENCE_S)

    with pytest.raises(StoreUnavailable, match="DB index"):
        store.ping()


# -- replies that get lost ----------------------------------------------------


class Losing(redis.Connection):
    """Carries one command out and then fails, as if the reply were lost."""

    error: BaseException | None = None

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        reply = super().read_response(*args, **kwargs)
        error, Losing.error = Losing.error, None
        if error is not None:
            raise error
        return reply


@pytest.fixture
def losing_store(redis_url: str) -> Iterator[RedisStore]:
    address = RedisStore.from_url(redis_url)._connections.address
    with closing(RedisStore(replace(address, connection_class=Losing))) as store:
        store.ping()
        yield store
        Losing.error = None


@pytest.mark.server
def test_a_call_whose_reply_was_lost_is_not_its_own_duplicate(losing_store, key):
    Losing.error = redis.ConnectionError("reset by peer")

    acquired = losing_store.acquire(key, claim("a"))

    assert acquired.outcome == "created"
    assert task_of(losing_store, key, "a").duplicates == 0


@pytest.mark.server
@pytest.mark.parametrize("behind", ["a task that waits", "a task with its own follower"])
def test_a_probe_whose_reply_was_lost_merges_its_values_once(losing_store, key, behind):
    publish(losing_store, key, "a", merge='{"numbers": [1]}')
    if behind != "a task that waits":  # more than the fast path of the script reads
        losing_store.acquire(key, claim("b", merge='{"numbers": [2]}', join="its message"))
    Losing.error = redis.ConnectionError("reset by peer")

    acquired = losing_store.probe(key, claim("c", merge='{"numbers": [3]}'))

    assert acquired.outcome == "merged"
    assert acquired.holder.task_id == "a"
    payload = losing_store.start(key, start("a", merge=True)).payload
    assert payload.count("[3]") == 1


@pytest.mark.server
def test_a_probe_whose_reply_was_lost_still_creates_nothing(losing_store, key):
    Losing.error = redis.ConnectionError("reset by peer")

    assert losing_store.probe(key, claim("a", merge='{"numbers": [1]}')) is None
    assert not losing_store.read(key)[0].tasks


@pytest.mark.server
def test_a_probe_with_the_id_of_the_task_whose_reply_was_lost_admits_nothing(losing_store, key):
    publish(losing_store, key, "a", merge='{"numbers": [1]}')
    Losing.error = redis.ConnectionError("reset by peer")

    again = losing_store.probe(key, claim("a", merge='{"numbers": [2]}'))

    assert again is None or again.outcome == "merged"


@pytest.mark.server
def test_a_batch_whose_replies_were_lost_goes_on_where_it_broke(losing_store):
    keys = [fresh_key() for _ in range(20)]
    losing_store.acquire_many([(key, claim("warm")) for key in keys[:1]])
    Losing.error = redis.ConnectionError("reset by peer")

    outcomes = losing_store.acquire_many([(key, claim("a")) for key in keys])

    assert [one.outcome for one in outcomes] == ["duplicate"] + ["created"] * 19


@pytest.mark.server
def test_a_time_out_is_not_tried_again(losing_store, key):
    Losing.error = redis.TimeoutError("no reply")

    with pytest.raises(StoreUnavailable, match="in time"):
        losing_store.acquire(key, claim("a"))

    assert losing_store.acquire(key, claim("a", again=True)).outcome == "created"


@pytest.mark.server
def test_an_interrupted_act_leaves_no_reply_to_the_next_one(losing_store, key):
    """Celery's soft time limit is raised wherever the body happens to be."""
    publish(losing_store, key, "a")
    Losing.error = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        losing_store.help(key, "a")

    assert losing_store.cancel(key, "a", MINUTE) == "cancelled"


# -- threads, greenlets and processes -----------------------------------------


@pytest.mark.server
def test_a_burst_leaves_a_bounded_number_of_connections(redis_url, redis_server):
    database = redis_url.rpartition("/")[2]

    def clients() -> set[str]:
        with redis_server.client() as client:
            return {each["id"] for each in client.client_list() if each["db"] == database}

    before = clients()  # other tests of this process may have used the database
    with closing(RedisStore.from_url(redis_url, timeout_s=PATIENCE_S)) as store:
        barrier = threading.Barrier(MOST_IDLE + 40)

        def ask(_: int) -> None:
            taken = store._connections.take(time.monotonic() + 30)
            barrier.wait()
            store._connections._exchange([("PING",)], [], time.monotonic() + 30, taken)

        with ThreadPoolExecutor(MOST_IDLE + 40) as threads:
            list(threads.map(ask, range(MOST_IDLE + 40)))

        assert len(store._connections._idle) <= MOST_IDLE + 2  # two threads may tie
    eventually(lambda: clients() <= before, message="connections are left")


def test_the_packer_of_commands_gets_text_only(redis_server, monkeypatch):
    """hiredis makes text of a number by calling Python: a signal there has crashed processes."""
    seen: list[tuple[Any, ...]] = []
    pack: Any = connections.pack_command

    def packing(command: tuple[Any, ...]) -> bytes:
        seen.append(command)
        packed: bytes = pack(command)
        return packed

    monkeypatch.setattr(connections, "pack_command", packing)
    with closing(RedisStore.from_url(redis_server.fresh_url())) as store:
        key, other = fresh_key(), fresh_key()
        run(store, key, "first")
        store.renew([running(key, "first")])
        store.acquire(key, claim("second", delay_ms=5, window_ms=7))
        store.acquire(key, claim("follower", join="message"))
        store.finish(key, finish("first", settle_later=True))
        store.settle(key, finish("first", settle_later=True), True)
        tried = fresh_key()
        run(store, tried, "tried")
        store.retry(tried, "tried", "d1", MINUTE, False)
        store.acquire_many([(other, claim("third")), (fresh_key(), claim("fourth"))])
        store.begin_acquire_many([(fresh_key(), claim("fifth"))], [(other, "third", MINUTE)])()
        store.begin_acquire(fresh_key(), claim("sixth"))()
        store.help(other, "third")
        store.cancel(other, "third", MINUTE)
        store.give_back(other, "third", MINUTE)
        store.release(other)
        store.forget(key, "first")
        store.flush()
        list(store.walk())
        store.read(key)
        store.due()
        store.diagnose()
        store.ping()

    assert len(seen) > 15
    assert {type(part) for command in seen for part in command} <= {str, bytes}


@pytest.mark.parametrize(
    ("current_s", "left_s", "is_set"),
    [(None, 0.5, True), (2.0, 0.5, True), (0.5, 2.0, True), (0.5, 0.5, False)],
)
def test_a_socket_gets_another_time_out_only_where_that_matters(current_s, left_s, is_set):
    """It is a system call, and an exchange after another has nearly the same time."""
    with socket.socket() as sock:
        sock.settimeout(current_s)
        connection = redis.Connection()
        connection._sock = sock
        connections.set_deadline(connection, time.monotonic() + left_s)
        changed = sock.gettimeout()
        connection._sock = None
    assert (changed != current_s) is is_set
    assert changed == pytest.approx(left_s, abs=0.1)
