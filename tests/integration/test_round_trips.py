"""What one call and one run cost on Redis: counted on a real server, command by command."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery

from celery_unique import DuplicateTask, apply_many, lookup
from celery_unique.config.app_state import state_of
from celery_unique.publish import apply_many as batches
from celery_unique.stores.redis import scripts
from tests.support import RedisServer, eventually
from tests.support.app import flush, make_app, value_of, working

pytestmark = pytest.mark.server


class Command(NamedTuple):
    database: int
    client: str
    text: str

    @property
    def name(self) -> str:
        return self.text.split(" ", 1)[0].upper()

    @property
    def is_one_way(self) -> bool:
        return any(script.sha in self.text for script in ONE_WAY)


#: What a connection says when it is opened, and what a test says to wait for the end.
OPENING = ("HELLO", "AUTH", "SELECT", "CLIENT", "ECHO")
#: What kombu does now and then for messages that were not acknowledged in time.
RESTORING = (
    *("SET", "ZRANGE", "ZREVRANGEBYSCORE", "WATCH", "GET", "UNWATCH", "DEL"),
    *("MULTI", "EXEC", "EVALSHA", "SCRIPT"),
)
ONE_WAY = (scripts.CONFIRM, scripts.SETTLE, scripts.FORGET)


class Traffic:
    """The commands that clients sent to one database; what a script does inside is none."""

    def __init__(self, commands: list[Command], database: int) -> None:
        asked = [c for c in commands if c.database == database and c.name not in OPENING]
        #: Somebody waits for the answer to each of these.
        self.blocking = [c.name for c in asked if not c.is_one_way]
        #: Sent by a thread of their own: see test_nobody_waits_for_the_confirmation.
        self.one_way = [c.name for c in asked if c.is_one_way]


class Watched:
    def __init__(self, server: RedisServer) -> None:
        self._server = server

    @contextmanager
    def during(self) -> Iterator[list[Command]]:
        """Every command of every client, complete when the block has ended."""
        seen: list[Command] = []
        ended = f"ended {uuid.uuid4()}"
        listening = threading.Event()

        def listen() -> None:
            with self._server.client() as client, client.monitor() as monitor:
                listening.set()
                for line in monitor.listen():
                    if line["command"] == f"ECHO {ended}":
                        return
                    if line["client_type"] != "lua":
                        client_name = f"{line['client_address']}:{line['client_port']}"
                        seen.append(Command(line["db"], client_name, line["command"]))

        thread = threading.Thread(target=listen)
        thread.start()
        assert listening.wait(10)
        with self._server.client() as marker:
            try:
                yield seen
            finally:
                marker.echo(ended)
                thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def watched(redis_server: RedisServer) -> Watched:
    return Watched(redis_server)


@pytest.fixture
def app(redis_server: RedisServer) -> Iterator[Celery]:
    """Locks in a Redis database of their own, messages elsewhere."""
    app = make_app(redis_server.fresh_url())
    yield app
    state_of(app).store.close()


def database_of(app: Celery) -> int:
    return int(app.conf.unique_store_url.rpartition("/")[2])


@pytest.fixture
def rebuild(app: Celery) -> Any:
    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    # Connected, and the server knows the scripts.
    rebuild.delay(0)
    rebuild.delay(0)
    flush(app)
    return rebuild


def traffic_of(app: Celery, watched: Watched, call: Callable[[], Any]) -> Traffic:
    with watched.during() as seen:
        call()
        flush(app)
    return Traffic(seen, database_of(app))


# -- callers ----------------------------------------------------------------------------------


def test_a_new_call_is_one_blocking_round_trip(app, rebuild, watched):
    traffic = traffic_of(app, watched, lambda: rebuild.delay(7))

    assert traffic.blocking == ["EVALSHA"]
    assert traffic.one_way == ["EVALSHA"]


def test_a_duplicate_is_one_blocking_round_trip(app, rebuild, watched):
    rebuild.delay(7)
    flush(app)

    traffic = traffic_of(app, watched, lambda: rebuild.delay(7))

    assert traffic.blocking == ["EVALSHA"]
    assert traffic.one_way == []


def test_a_rejected_duplicate_is_one_blocking_round_trip(app, rebuild, watched):
    rebuild.delay(7)
    flush(app)

    def call() -> None:
        with pytest.raises(DuplicateTask):
            rebuild.apply_async((7,), unique_on_conflict="reject")

    traffic = traffic_of(app, watched, call)

    assert traffic.blocking == ["EVALSHA"]
    assert traffic.one_way == []


def test_calls_of_one_process_in_a_row_do_not_wait_for_their_own_confirmations(
    app, rebuild, watched
):
    def call() -> None:
        for shop_id in range(1, 51):
            rebuild.delay(shop_id)
            rebuild.delay(shop_id)

    traffic = traffic_of(app, watched, call)

    assert traffic.blocking == ["EVALSHA"] * 100
    assert traffic.one_way == ["EVALSHA"] * 50


def test_confirmations_of_many_calls_go_along_with_the_next_questions(app, rebuild, watched):
    part = batches.TOGETHER

    with watched.during() as seen:
        apply_many(rebuild.s(shop_id) for shop_id in range(1, 3 * part + 1))
        flush(app)

    names = {scripts.ACQUIRE.sha: "ask", scripts.CONFIRM.sha: "confirm"}
    said = [names[c.text.split()[1]] for c in seen if c.name == "EVALSHA"]
    # Before the first message of a part is sent, the next part is asked for.
    assert said == ["ask"] * 2 * part + ["confirm"] * part + ["ask"] * part + ["confirm"] * 2 * part


def test_nobody_waits_for_the_confirmation(redis_server, start_proxy):
    """With the answers of the store held back after the lock is taken, the call returns."""
    proxy = start_proxy(redis_server.port)
    app = make_app(proxy.url_of(redis_server.fresh_url()), unique_store_timeout=60)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(0)
    flush(app)
    publish = app.amqp.send_task_message

    def send_and_stall(*args: Any, **options: Any) -> Any:
        proxy.stall_replies()
        return publish(*args, **options)

    app.amqp.send_task_message = send_and_stall
    returned = threading.Event()
    threading.Thread(target=lambda: (rebuild.delay(7), returned.set()), daemon=True).start()

    assert returned.wait(20)
    proxy.restore()
    flush(app)
    assert lookup(rebuild, (7,)).state == "available"


# -- what is stored ---------------------------------------------------------------------------


def keys_in(app: Celery) -> list[str]:
    with redis.Redis.from_url(app.conf.unique_store_url) as client:
        return [name.decode() for name in client.scan_iter()]


def key_of_lock(app: Celery) -> str:
    """The one key that there is; it expires by itself."""
    [name] = keys_in(app)
    with redis.Redis.from_url(app.conf.unique_store_url) as client:
        assert client.pttl(name) > 0
    return name


def fields_in(app: Celery, name: str) -> set[str]:
    with redis.Redis.from_url(app.conf.unique_store_url) as client:
        return {field.decode() for field in client.hkeys(name)}


def test_a_lock_is_one_key_whatever_becomes_of_it(app):
    while_it_runs: list[Any] = []

    @app.task(name="shop.rebuild", unique=True, unique_for=600, unique_states="window")
    def rebuild(shop_id: int) -> int:
        while_it_runs.append((lookup(rebuild, (7,)).state, keys_in(app)))
        return shop_id

    first = rebuild.delay(7)
    pending = key_of_lock(app)
    rebuild.delay(7)
    flush(app)
    waiting = key_of_lock(app)
    its_fields = fields_in(app, waiting)
    with working(app):
        assert value_of(first) == 7
    flush(app)
    ended = key_of_lock(app)

    assert first.unique_key in waiting
    assert pending == waiting == ended
    assert its_fields == {"n", f"t:{first.id}"}
    assert while_it_runs == [("active", [waiting])]
    assert lookup(rebuild, (7,)).state == "completed"
    assert rebuild.delay(7).id == first.id


def test_a_lock_whose_task_was_replaced_is_still_one_key(app):
    @app.task(name="shop.rebuild", unique=True, unique_on_conflict="replace")
    def rebuild(shop_id: int) -> int:
        return shop_id

    ids = [rebuild.delay(7).id for _ in range(3)]
    flush(app)
    waiting = key_of_lock(app)
    its_fields = fields_in(app, waiting)
    with working(app):
        assert value_of(app.AsyncResult(ids[-1])) == 7
    flush(app)

    # A mark for each message that is still to be dropped.
    assert its_fields == {"n", f"m:{ids[0]}", f"m:{ids[1]}", f"t:{ids[2]}"}
    assert keys_in(app) == []


def test_a_lock_with_followers_is_two_keys_and_one_again_without_them(app):
    @app.task(name="shop.rebuild", unique=True, unique_for=600, unique_states="window")
    def rebuild(shop_id: int) -> int:
        return shop_id

    first = rebuild.delay(7)
    flush(app)
    alone = key_of_lock(app)
    followers = [rebuild.apply_async((7,), task_id=f"follower {n}") for n in range(3)]
    followed = keys_in(app)
    with working(app):
        assert [value_of(each) for each in (first, *followers)] == [7] * 4
    flush(app)

    assert {each.outcome for each in followers} == {"joined"}
    its_own = [name for name in followed if first.unique_key in name]
    assert len(its_own) == 2
    assert alone in its_own
    # What is left is no lock's own: one of 64 lists of the keys that have followers.
    assert [name for name in followed if name not in its_own] == [f"{alone.partition('}')[0]}}}due"]
    assert key_of_lock(app) == alone


def test_many_locks_are_as_many_keys(app, rebuild):
    for shop_id in range(1, 20):
        rebuild.delay(shop_id)
    flush(app)

    assert len(keys_in(app)) == 20


# -- workers ----------------------------------------------------------------------------------

WORKER = """
import os
from celery import Celery
import celery_unique

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BACKEND"])
# A busy machine's store is waited for at the gate: see tests/support/patience.py.
celery_unique.install(app, store_url=os.environ["STORE"], gate_timeout=5, store_timeout=10)

@app.task(name="shop.rebuild", unique=True)
def rebuild(shop_id):
    return shop_id
"""


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_run_is_one_round_trip_to_start_and_one_to_finish(
    redis_server, watched, start_worker, tmp_path, pool
):
    broker, backend, store = (redis_server.fresh_url() for _ in range(3))
    (tmp_path / "round_trips_app.py").write_text(WORKER)
    start_worker(
        "round_trips_app",
        pool=pool,
        python_path=[tmp_path],
        env={"BROKER": broker, "BACKEND": backend, "STORE": store},
    )
    app = make_app(store, broker_url=broker, result_backend=backend, task_default_queue="celery")

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(0).get(timeout=20)  # connected, and the scripts are known
    flush(app)

    with watched.during() as seen:
        assert [rebuild.delay(n).get(timeout=20) for n in range(1, 11)] == list(range(1, 11))
        flush(app)

    # A message that waits in the worker for a second, on a busy machine, is renewed besides.
    acts = [command for command in seen if scripts.RENEW.sha not in command.text]
    traffic = Traffic(acts, database_of(app))
    # Ten calls, ten starts, ten ends; and the confirmations, for which nobody waits.
    assert traffic.blocking == ["EVALSHA"] * 30
    assert traffic.one_way == ["EVALSHA"] * 10


@pytest.mark.parametrize("ignored", [False, True], ids=["result", "ignored"])
def test_a_whole_life_is_three_scripts_and_what_kombu_records(
    redis_server, watched, start_worker, tmp_path, ignored
):
    """Messages, results and locks in one database, as by default."""
    url = redis_server.fresh_url()
    (tmp_path / "whole_life_app.py").write_text(WORKER)
    start_worker(
        "whole_life_app",
        python_path=[tmp_path],
        env={"BROKER": url, "BACKEND": url, "STORE": url},
    )
    app = make_app(url, broker_url=url, result_backend=url, task_default_queue="celery")

    @app.task(name="shop.rebuild", unique=True, ignore_result=ignored)
    def rebuild(shop_id: int) -> None: ...

    def live(number: int) -> None:
        result = rebuild.delay(number)
        if not ignored:
            assert result.get(timeout=20) == number
        # Until it is acknowledged, too.
        eventually(lambda: lookup(rebuild, (number,)) is None and not client.hlen("unacked"))

    with redis_server.client(int(url.rpartition("/")[2])) as client:
        live(0)  # connected, and the scripts are known
        with watched.during() as seen:
            for number in range(1, 11):
                live(number)
    # What this test reads itself, and a worker that is slow.
    acts = [each for each in seen if each.name not in ("HLEN", "HGETALL", "TIME")]
    acts = [each for each in acts if scripts.RENEW.sha not in each.text]
    names = Counter(each.name for each in acts if each.database == database_of(app))
    # Call, start, and end with the result; other scripts are those of kombu's mutex.
    end = scripts.FINISH if ignored else scripts.FINISH_WITH_RESULT
    every = [each for each in vars(scripts).values() if isinstance(each, scripts.Script)]
    ran = Counter(each.sha for act in acts for each in every if each.sha in act.text)
    assert ran == dict.fromkeys((scripts.PUBLISH_PLAIN.sha, scripts.START.sha, end.sha), 10)
    # The message, received and acknowledged.
    recorded = dict.fromkeys(("ZADD", "HSET", "ZREM", "HDEL"), 10)
    assert {name: names[name] for name in recorded} == recorded
    waiting = {"BRPOP", "SUBSCRIBE", "UNSUBSCRIBE", "PING"}
    assert set(names) <= {*recorded, *waiting, *RESTORING}
    # The caller reads its result. In the worker Celery neither reads nor writes it.
    results = Counter(each.name for each in acts if "celery-task-meta-" in each.text)
    assert set(results) <= {"EVALSHA", "SUBSCRIBE", "UNSUBSCRIBE", "GET"}
    assert results["GET"] <= (0 if ignored else 10)
