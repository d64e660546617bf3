"""Lock and message, and finish and result, as one act on Redis and Valkey."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import Acquired, Called, Holder, Push, ResultWrite
from celery_unique.stores.circuit_breaker import PushRefused
from celery_unique.stores.record import State
from celery_unique.stores.redis import RedisStore, connections, scripts
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


@pytest.mark.parametrize(("fields", "pushed"), [({}, 0), ({"window_ms": MINUTE}, 1)])
def test_a_publish_that_arrives_after_the_end_of_its_copy(
    store, client, key, fields, pushed, monkeypatch
):
    """The call was published without the store, and its caller reads no reply. The short script
    leaves a record with a mark alone, the other one pushes: the task runs twice."""
    begin_all = store._commands.begin_all

    def unread(*arguments: Any) -> Any:
        wait = begin_all(*arguments)
        wait()
        raise StoreUnavailable("the caller has gone")

    store.start(key, start("a"))
    store.finish(key, finish("a", settle_later=True))
    store.settle(key, finish("a"), True)
    store.flush()

    monkeypatch.setattr(store._commands, "begin_all", unread)
    with pytest.raises(StoreUnavailable):
        call(store, key, "a", **fields)

    assert client.llen(QUEUE) == pushed


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

    assert isinstance(refused, PushRefused)
    assert "refused to push to the queue taken: WRONGTYPE" in str(refused)
    assert record_of(store, key) == before
    assert call(store, key, "b", on_conflict="replace").outcome == "created"


def test_a_refused_push_of_a_merged_call_merges_nothing(store, client, key):
    client.set("taken", "by another program")
    merged = {"on_conflict": "merge", "merge": '{"shops":[1]}', "merge_max_bytes": 100}

    refused = call(store, key, "a", queue="taken", **merged)

    assert isinstance(refused, PushRefused)
    assert "refused to push to the queue taken: WRONGTYPE" in str(refused)
    assert client.keys("cu:*") == []


def test_a_user_without_rights_on_the_queue_is_refused_and_others_are_not_affected(
    store, client, url, key
):
    client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", "+@all", "~cu:*", "~mine")
    restricted = url.replace("redis://", "redis://locks:pw@")
    with closing(RedisStore.from_url(restricted, timeout_s=PATIENCE_S)) as store:
        pushes = [(key, claim("a"), push("a")), (fresh_key(), claim("b"), push("b", "mine"))]
        refused, created = store.begin_publish(pushes)()

    assert isinstance(refused, PushRefused)
    assert f"refused to push to the queue {QUEUE}: " in str(refused)
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

    assert isinstance(refused, PushRefused)
    assert not isinstance(refused, UnreadableRecord)
    assert client.dbsize() == before


def test_a_publish_that_is_killed_has_not_pushed(start_server):
    """SCRIPT KILL ends a script that has written nothing; a longer one cannot be killed."""
    server = start_server(RedisServer, extra_args=("--lua-time-limit", "1"))
    key, many = fresh_key(), 400_000
    with closing(RedisStore.from_url(server.url, timeout_s=60)) as store, server.client() as client:
        # The server has the script.
        call(store, fresh_key(), "first", queue="other", canvas=True)
        record = Layout("", "").name_of(key)
        until = int(time.time() * 1000) + MINUTE * 10
        for first in range(0, many, 50_000):
            marks = {f"m:{n}": f'["done",{until}]' for n in range(first, first + 50_000)}
            client.hset(record, mapping=marks)

        wait = store.begin_publish([(key, claim("a", canvas=True), push("a"))])
        eventually(lambda: _is_killed(server), timeout=60)
        [killed] = wait()

        assert isinstance(killed, PushRefused)
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


# -- the short script, and what it leaves to the other ------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, store: RedisStore) -> list[str]:
    """The names of the scripts that the store sends, in order."""
    names = {
        script.sha: name.lower()
        for name, script in vars(scripts).items()
        if isinstance(script, scripts.Script)
    }
    seen: list[str] = []
    send = connections.send

    def note(connection: Any, commands: Any) -> None:
        seen.extend(names[sha] for each in commands for sha in each[1:2] if sha in names)
        send(connection, commands)

    monkeypatch.setattr(connections, "send", note)
    return seen


def test_a_new_call_and_its_duplicates_need_the_short_script_alone(store, key, ran):
    call(store, key, "a")
    call(store, key, "b")
    store.start(key, start("a"))
    while_it_runs = call(store, key, "c")

    assert (while_it_runs.holder.state, task_of(store, key, "a").duplicates) == (State.ACTIVE, 2)
    assert ran == ["publish_plain", "publish_plain", "start", "publish_plain"]


@pytest.mark.parametrize("task_id", ["with spaces in it", "10 20 30", "größe"])
def test_the_id_of_a_waiting_holder_may_be_any_text(store, key, task_id):
    call(store, key, task_id, "first")
    task = task_of(store, key, task_id)

    duplicate = call(store, key, "b", on_conflict="reject")

    assert duplicate.outcome == "rejected"
    assert duplicate.holder == Holder(task_id, State.AVAILABLE, task.created_at, task.lease)
    assert store.probe(key, claim("")).holder == duplicate.holder


def test_a_record_with_marks_is_left_to_the_other_script(store, client, key, ran):
    store.cancel(key, "revoked", MINUTE)

    assert call(store, key, "a").outcome == "created"
    assert call(store, key, "b").holder.task_id == "a"

    assert ran[1:] == ["publish_plain", "publish", "publish_plain", "publish"]
    assert client.llen(QUEUE) == 1
    assert list(record_of(store, key).marks) == ["revoked"]


def test_a_call_that_is_more_than_plain_does_not_begin_with_the_short_script(store, key, ran):
    more: list[dict[str, Any]] = [
        *(
            {"on_conflict": "replace"},
            {"on_conflict": "rerun"},
            {"keep": "c"},
            {"join": "all"},
        ),
        *({"delay_ms": MINUTE}, {"window_ms": MINUTE}, {"keep_ms": MINUTE}, {"canvas": True}),
        *({"arguments": "fingerprint"}, {"limit": 2}),
    ]
    for number, fields in enumerate(more):
        assert call(store, fresh_key(), "a", f"attempt-{number}", **fields).outcome == "created"

    assert ran == ["publish"] * len(more)


def test_a_batch_of_plain_calls_and_others_has_a_reply_for_each(store, client, key):
    marked = fresh_key()
    store.cancel(marked, "revoked", MINUTE)
    pushes = [(each, claim("a"), push(each)) for each in (key, marked, fresh_key())]

    plain = store.begin_publish([*pushes, (key, claim("b"), push("b"))])()
    mixed = store.begin_publish(
        [(key, claim("c", on_conflict="replace"), push("c")), (marked, claim("d"), push("d"))]
    )()

    assert [one.outcome for one in plain] == ["created"] * 3 + ["duplicate"]
    assert [one.outcome for one in mixed] == ["created", "duplicate"]
    assert client.llen(QUEUE) == 4


@pytest.mark.parametrize("marked", [False, True])
def test_a_plain_publish_whose_reply_was_lost_pushes_nothing_when_it_is_sent_again(
    store, client, key, marked, monkeypatch
):
    """Also where the record is one that the short script does not decide: the task of the id is
    that of another attempt, and the call is not its own duplicate."""
    if marked:
        store.cancel(key, "revoked", MINUTE)
    first = call(store, key, "a")
    reply_of, lost = connections.reply_of, [1]

    def lose_one(connection: Any) -> Any:
        reply = reply_of(connection)
        if lost:
            lost.clear()
            raise redis.ConnectionError
        return reply

    monkeypatch.setattr(connections, "reply_of", lose_one)
    again = call(store, key, "a")

    assert not lost
    assert (again.outcome, again.now == first.now) == ("created", True)
    assert client.llen(QUEUE) == 1


def test_a_repeated_attempt_without_receipt_shares_the_task_of_its_id(store, client, key):
    store.cancel(key, "revoked", MINUTE)
    call(store, key, "a", "first")

    assert call(store, key, "a", "second", again=True).outcome == "created"
    assert call(store, key, "a", "third").outcome == "duplicate"
    assert client.llen(QUEUE) == 1


# -- probe --------------------------------------------------------------------


def _waiting(store: RedisStore, key: str) -> None:
    publish(store, key, "a")


def _repeated(store: RedisStore, key: str) -> None:
    publish(store, key, "a")
    store.acquire(key, claim("b"))


def _running(store: RedisStore, key: str) -> None:
    run(store, key, "a")


def _pending(store: RedisStore, key: str) -> None:
    store.acquire(key, claim("a"))


def _scheduled(store: RedisStore, key: str) -> None:
    publish(store, key, "a", delay_ms=MINUTE)


def _followed(store: RedisStore, key: str) -> None:
    publish(store, key, "a")
    store.acquire(key, claim("b", join="its message"))


def _marked(store: RedisStore, key: str) -> None:
    store.cancel(key, "revoked", MINUTE)
    publish(store, key, "a")


def _only_marked(store: RedisStore, key: str) -> None:
    store.cancel(key, "revoked", MINUTE)


def _kept(store: RedisStore, key: str) -> None:
    run(store, key, "a", keep="c", keep_ms=MINUTE)
    store.finish(key, finish("a"))


def _nothing(store: RedisStore, key: str) -> None:
    pass


RECORDS = [
    *(_waiting, _repeated, _running, _pending, _scheduled, _followed, _marked, _only_marked),
    *(_kept, _nothing),
]


@pytest.mark.parametrize("stored", RECORDS)
@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"on_conflict": "reject"}, {"window_ms": 1}, {"window_ms": MINUTE}, {"parent": "a"}),
        *({"states": "r"}, {"limit": 2}),
    ],
)
def test_a_probe_by_the_short_script_returns_what_acquire_returns(store, key, stored, fields):
    stored(store, key)
    eventually(lambda: store.read(key)[1] > min(_created(store, key), default=0) + 1)

    by_acquire = store.probe(key, claim("with an id", **fields))
    short = store.probe(key, claim("", **fields))

    assert (short is None) == (by_acquire is None)
    if short is not None:
        assert (short.outcome, short.holder) == (by_acquire.outcome, by_acquire.holder)


def _created(store: RedisStore, key: str) -> list[int]:
    return [task.created_at for task in record_of(store, key).tasks.values()]


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


@pytest.fixture
def losing_reply(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the next reply on, one is lost with its connection."""
    reply_of, lost = connections.reply_of, [1]

    def lose_one(connection: Any) -> Any:
        reply = reply_of(connection)
        if not lost:
            lost.append(1)
            raise redis.ConnectionError
        return reply

    monkeypatch.setattr(connections, "reply_of", lose_one)
    return lost.clear


@pytest.mark.parametrize("with_result", [False, True])
@pytest.mark.parametrize("unless_stored", [False, True])
@pytest.mark.parametrize("keep", ["", "c"])
def test_an_end_whose_reply_was_lost_has_ended(
    store, client, key, losing_reply, with_result, unless_stored, keep
):
    run(store, key, "a", keep=keep)
    store.acquire(key, claim("b"))
    store.acquire(key, claim("c", on_conflict="queue", join="its message", states="pswrt"))
    result = ResultWrite("result", 60, '{"duplicates":', ',"of":1}', unless_stored)

    losing_reply()
    if with_result:
        finished = store.finish_with_result(key, finish("a"), result)
    else:
        finished = store.finish(key, finish("a"))

    assert (finished.verdict, finished.settle) == ("ended", False)
    assert finished.called == (Called("c", "its message", again=True),)
    if with_result:
        assert finished.duplicates == 1
        assert client.get("result") == '{"duplicates":1,"of":1}'


@pytest.mark.parametrize("write", ["SET", "RPUSH"])
def test_an_end_whose_reply_was_lost_writes_its_result_over_another_one(
    store, client, key, losing_reply, write
):
    """That of a state before: the end itself may not have arrived."""
    client.execute_command(write, "result", "before")
    losing_reply()

    finished = store.finish_with_result(key, finish("a"), ResultWrite("result", 0, "[", "]"))

    assert (finished.verdict, client.get("result")) == ("ended", "[0]")


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
