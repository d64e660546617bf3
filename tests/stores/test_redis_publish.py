"""Lock and message, and finish and result, as one act on Redis and Valkey."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import Acquired, Push, ResultWrite
from celery_unique.stores.record import State
from celery_unique.stores.redis import RedisStore
from celery_unique.stores.redis.layout import Layout
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    about,
    claim,
    finish,
    fresh_key,
    held,
    publish,
    record_of,
    run,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S
from tests.support import RedisServer, eventually

pytestmark = pytest.mark.server

QUEUE = "celery"


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
    with redis.Redis.from_url(url, decode_responses=True) as client:
        yield client


def push(attempt: str, queue: str = QUEUE) -> Push:
    return Push(queue, QUEUE_LEASE, attempt, f'{{"attempt":"{attempt}","at":', ',"is":"', '"}')


def call(
    store: RedisStore, key: str, task_id: str, attempt: str = "", queue: str = QUEUE, **fields: Any
) -> Acquired | StoreUnavailable:
    pushes = [(key, claim(task_id, **fields), push(attempt or task_id, queue))]
    [reply] = store.begin_publish(pushes)()
    return reply


def outcomes(client: redis.Redis) -> list[str]:
    """Of the messages in the queue, oldest first."""
    messages: Any = client.lrange(QUEUE, 0, -1)
    return [message.split('"')[-2] for message in reversed(messages)]


def test_a_new_call_is_recorded_as_available_with_its_message(store, client, key):
    created = call(store, key, "a")

    task = task_of(store, key, "a")
    assert (created.outcome, task.state, task.lease) == (
        "created",
        "w",
        about(task.created_at + QUEUE_LEASE),
    )
    assert client.lrange(QUEUE, 0, -1) == [f'{{"attempt":"a","at":{task.created_at},"is":""}}']
    assert store.start(key, start("a")).verdict == "run"


def test_the_lease_runs_from_the_eta(store, key):
    created = call(store, key, "a", delay_ms=10 * MINUTE)

    task = task_of(store, key, "a")
    assert created.eta == task.eta == task.created_at + 10 * MINUTE
    assert task.lease == task.eta + QUEUE_LEASE


def test_a_duplicate_pushes_nothing(store, client, key):
    call(store, key, "a")

    duplicate = call(store, key, "b")

    assert (duplicate.outcome, duplicate.holder.task_id) == ("duplicate", "a")
    assert client.llen(QUEUE) == 1


def test_a_replaced_task_is_superseded_in_the_same_act(store, client, key):
    call(store, key, "a", canvas=True)

    created = call(store, key, "b", on_conflict="replace")

    assert (created.replaced, created.followers) == (("a",), ("a",))
    assert list(record_of(store, key).tasks) == ["b"]
    assert store.start(key, start("a")).by == "b"
    assert outcomes(client) == ["", "replaced"]


def test_a_rerun_waits_for_the_task_that_runs(store, client, key):
    run(store, key, "a")

    created = call(store, key, "b", on_conflict="rerun")

    assert created.after == "a"
    assert store.start(key, start("b")).verdict == "wait"
    assert outcomes(client) == ["rerun"]


def test_a_call_that_would_join_follows_the_holder(store, client, key):
    call(store, key, "a")

    assert call(store, key, "b", join="its message").outcome == "joined"
    assert [one for one, _ in store.followers(key, "a")] == ["b"]
    assert client.llen(QUEUE) == 1


def test_a_promoted_call_that_is_published_no_longer_follows(store, client, key):
    publish(store, key, "a")
    store.acquire(key, claim("b", join="its message"))
    store.cancel(key, "a", MINUTE)
    store.reap(key, "reaper", MINUTE)
    assert store.promote(key, "b", "reaper", MINUTE, MINUTE) == "publish"

    assert call(store, key, "b", again=True).outcome == "created"

    assert store.followers(key) == []
    assert task_of(store, key, "b").state == "w"
    assert client.llen(QUEUE) == 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_publish_that_is_repeated_pushes_nothing_even_after_the_end(store, client, key, ends):
    call(store, key, "old")
    first = call(store, key, "a", on_conflict="replace")
    if ends:
        store.start(key, start("a"))
        store.finish(key, finish("a"))

    assert call(store, key, "a", on_conflict="replace", again=True) == first
    assert client.llen(QUEUE) == 2


def test_a_publish_that_never_arrived_is_pushed_when_it_is_repeated(store, client, key):
    assert call(store, key, "a", again=True).outcome == "created"
    assert client.llen(QUEUE) == 1


def test_a_batch_has_a_reply_for_each(store, client):
    keys = [fresh_key() for _ in range(600)]
    pushes = [(key, claim("a"), push(key)) for key in keys]

    replies = store.begin_publish([*pushes, (keys[0], claim("b"), push("b"))])()

    assert [one.outcome for one in replies] == ["created"] * 600 + ["duplicate"]
    assert client.llen(QUEUE) == 600


@pytest.mark.parametrize("occupied", [False, True])
def test_a_refused_push_leaves_nothing_and_names_the_queue(store, client, key, occupied):
    if occupied:
        call(store, key, "a")
    client.set("taken", "by another program")
    before = record_of(store, key)

    refused = call(store, key, "b", queue="taken", on_conflict="replace")

    assert isinstance(refused, StoreUnavailable)
    assert not isinstance(refused, UnreadableRecord)
    assert "refused to push to the queue taken: WRONGTYPE" in str(refused)
    assert record_of(store, key) == before
    assert call(store, key, "b", on_conflict="replace").outcome == "created"


def test_a_user_without_rights_on_the_queue_is_refused_and_others_are_not_affected(
    store, client, url, key
):
    client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", "+@all", "~cu:*", "~mine")
    restricted = url.replace("redis://", "redis://locks:pw@")
    with closing(RedisStore.from_url(restricted, timeout_s=PATIENCE_S)) as store:
        pushes = [(key, claim("a"), push("a")), (fresh_key(), claim("b"), push("b", "mine"))]
        refused, created = store.begin_publish(pushes)()

    assert isinstance(refused, StoreUnavailable)
    assert created.outcome == "created"
    assert client.llen(QUEUE) == 0


def test_a_full_server_refuses_without_a_trace(store, client, key):
    call(store, fresh_key(), "warm")
    before = client.dbsize()
    try:
        client.config_set("maxmemory", 1)
        refused = call(store, key, "a")
    finally:
        client.config_set("maxmemory", 0)

    assert isinstance(refused, StoreUnavailable)
    assert not isinstance(refused, UnreadableRecord)
    assert client.dbsize() == before


def test_a_publish_that_is_killed_has_not_pushed(start_server):
    """SCRIPT KILL ends a script that has written nothing; a longer one cannot be killed."""
    server = start_server(RedisServer, extra_args=("--lua-time-limit", "1"))
    key, many = fresh_key(), 400_000
    with closing(RedisStore.from_url(server.url, timeout_s=60)) as store, server.client() as client:
        call(store, fresh_key(), "first", queue="other")  # the server has the script
        record = Layout("", "").name_of(key)
        until = int(time.time() * 1000) + MINUTE * 10
        for first in range(0, many, 50_000):
            marks = {f"m:{n}": f'["done",{until}]' for n in range(first, first + 50_000)}
            client.hset(record, mapping=marks)

        wait = store.begin_publish([(key, claim("a"), push("a"))])
        eventually(lambda: _is_killed(server), timeout=60)
        [killed] = wait()

        assert isinstance(killed, StoreUnavailable)
        assert not isinstance(killed, UnreadableRecord)
        assert (client.llen(QUEUE), client.hlen(record)) == (0, many)
        assert store.withdraw(key, "a", "a", MINUTE) == "withdrawn"


def _is_killed(server: RedisServer) -> bool:
    with server.client() as client:
        try:
            return bool(client.script_kill())
        except redis.ResponseError:  # it has not been running for long enough
            return False


def test_a_script_flush_is_survived(store, client, key):
    call(store, fresh_key(), "warm")
    client.script_flush()

    assert call(store, key, "a").outcome == "created"
    assert client.llen(QUEUE) == 2


# -- probe --------------------------------------------------------------------


def test_a_probe_creates_nothing(store, client, key):
    assert store.probe(key, claim("a")) is None
    assert client.dbsize() == 0
    publish(store, key, "a")
    before = record_of(store, key)

    assert store.probe(key, claim("b", on_conflict="replace")) is None
    assert record_of(store, key) == before


def test_a_probe_that_conflicts_is_counted_and_joins(store, key):
    publish(store, key, "a")

    assert store.probe(key, claim("b")).outcome == "duplicate"
    assert store.probe(key, claim("c", join="its message")).outcome == "joined"
    assert task_of(store, key, "a").duplicates == 2
    assert [one for one, _ in store.followers(key)] == ["c"]


# -- withdraw -----------------------------------------------------------------


def test_a_withdrawn_task_is_dropped_at_the_gate_and_its_key_is_free(store, key):
    call(store, key, "a")

    assert store.withdraw(key, "a", "a", MINUTE) == "withdrawn"

    assert record_of(store, key).tasks == {}
    assert store.start(key, start("a")).mark == "withdrawn"
    assert call(store, key, "b").outcome == "created"


def test_a_publish_that_arrives_after_its_withdrawal_is_refused_a_new_call_is_not(
    store, client, key
):
    assert store.withdraw(key, "a", "first", MINUTE) == "withdrawn"

    assert "WITHDRAWN" in str(call(store, key, "a", "first"))
    assert client.llen(QUEUE) == 0
    assert call(store, key, "a", "second").outcome == "created"
    assert store.start(key, start("a")).verdict == "run"


@pytest.mark.parametrize("ended", [False, True])
def test_a_task_that_started_or_ended_is_not_withdrawn(store, key, ended):
    call(store, key, "a")
    store.start(key, start("a"))
    if ended:
        store.finish(key, finish("a"))

    assert store.withdraw(key, "a", "a", MINUTE) == "active"
    assert record_of(store, key).marks == {}


def test_a_task_that_other_calls_depend_on_is_not_withdrawn(store, key):
    call(store, key, "a")
    call(store, key, "b")
    other = fresh_key()
    call(store, other, "a", "a2")
    call(store, other, "b", "b2", on_conflict="replace")

    assert store.withdraw(key, "a", "a", MINUTE) == "active"
    assert store.withdraw(other, "b", "b2", MINUTE) == "active"
    assert store.start(other, start("b")).verdict == "run"


def test_a_task_of_another_publish_with_the_same_id_is_not_withdrawn(store, key):
    call(store, key, "a", "second")

    assert store.withdraw(key, "a", "first", MINUTE) == "active"
    assert store.start(key, start("a")).verdict == "run"


def test_a_task_on_which_a_second_publish_of_its_id_depends_is_not_withdrawn(store, client, key):
    """The first call had no reply and raised; the second, with the same id, lost its reply."""
    call(store, key, "a", "first")
    second = call(store, key, "a", "second", again=True)

    assert isinstance(second, Acquired)
    assert (second.outcome, len(outcomes(client))) == ("created", 1)
    assert store.withdraw(key, "a", "first", MINUTE) == "active"
    assert store.start(key, start("a")).verdict == "run"


# -- the rest -----------------------------------------------------------------


def test_a_renewal_of_a_held_message_records_that_a_copy_may_exist(store, key):
    call(store, key, "a")

    assert store.renew([replace(held(key, "a"), copies=True)]) == [1]

    assert task_of(store, key, "a").copies
    store.start(key, start("a"))
    assert store.finish(key, finish("a")).settle


@pytest.mark.parametrize("expires_s", [0, 60])
def test_finish_writes_and_announces_the_result(store, client, key, expires_s):
    run(store, key, "a")
    store.acquire(key, claim("b"))
    with client.pubsub() as listener:
        listener.subscribe("result")
        listener.get_message(timeout=PATIENCE_S)

        result = ResultWrite("result", expires_s, '{"duplicates":', "}")
        finished = store.finish_with_result(key, finish("a"), result)

        message = listener.get_message(timeout=PATIENCE_S)
    assert (finished.verdict, finished.duplicates) == ("ended", 1)
    assert client.get("result") == message["data"] == '{"duplicates":1}'
    assert client.ttl("result") == (pytest.approx(60, abs=5) if expires_s else -1)
    assert record_of(store, key).tasks == {}


def test_the_result_is_written_whatever_the_verdict(store, client, key):
    result = ResultWrite("result", 0, "[", "]")

    assert store.finish_with_result(key, finish("a"), result).verdict == "not_yours"
    assert client.get("result") == "[0]"


@pytest.mark.parametrize("write", ["SET", "RPUSH"])
def test_a_result_that_is_stored_already_is_left_with_the_lock(store, client, key, write):
    run(store, key, "a")
    client.execute_command(write, "result", "before")
    result = ResultWrite("result", 0, "[", "]", unless_stored=True)

    assert store.finish_with_result(key, finish("a"), result).verdict == "stored"
    assert client.type("result") == ("string" if write == "SET" else "list")
    assert [task.stored_state for task in record_of(store, key).tasks.values()] == [State.ACTIVE]
    client.delete("result")
    assert store.finish_with_result(key, finish("a"), result).verdict == "ended"
    assert client.get("result") == "[0]"


@pytest.mark.parametrize("worker", ["w/1", 'w"1', "w\\1", "w\n1", "wörker", "w\x7f", 'w",1,"2"]'])
@pytest.mark.parametrize("duplicates", [0, 2])
def test_a_worker_may_have_any_name(store, key, worker, duplicates):
    """A task that is alone is written and read as text, unless its worker's name prevents that."""
    publish(store, key, "a")
    token = store.start(key, replace(start("a"), delivery=worker)).token
    for number in range(duplicates):
        store.acquire(key, claim(f"b{number}"))

    task = record_of(store, key).tasks["a"]
    assert (task.stored_state, task.delivery, task.token) == (State.ACTIVE, worker, token)
    assert store.finish(key, replace(finish("a"), delivery="another")).verdict == "not_yours"
    finished = store.finish(key, replace(finish("a"), delivery=worker))
    assert (finished.verdict, finished.duplicates) == ("ended", duplicates)
    assert record_of(store, key).tasks == {}


def test_the_address_is_that_of_one_server(url):
    with closing(RedisStore.from_url(url.replace("//", "//me:pw@"))) as store:
        port, _, db = url.rpartition(":")[2].partition("/")
        assert store.address == ("127.0.0.1", int(port), int(db), "me", "")
    assert RedisStore.from_url("unix:///tmp/r.sock?db=2").address == ("", 0, 2, "", "/tmp/r.sock")
