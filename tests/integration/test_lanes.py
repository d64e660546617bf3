"""Lanes: calls that wait for their turn instead of being dropped."""

from __future__ import annotations

import json
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import beat, chain, chord, group
from celery.exceptions import QueueNotFound, TaskRevokedError
from kombu import Queue
from kombu.exceptions import ContentDisallowed

import celery_unique
from celery_unique import DuplicateTask, InvalidPolicy, UniquePolicy
from celery_unique.config.app_state import state_of
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.promote import reap_orphans
from celery_unique.operations.search import Wanted, find_page
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.stores import open_store
from celery_unique.stores.base import Claim
from celery_unique.testing import assert_queued, locks_in_memory
from celery_unique.testing.store_contract.factories import fresh_key
from celery_unique.worker.reaper import Reaper
from tests.support import RedisServer
from tests.support.app import advance, define, flush, make_app, messages, value_of, working
from tests.support.waiting import eventually

LANE = {"unique": True, "unique_on_conflict": "queue"}


def redis_app(url: str, **conf: Any) -> Any:
    return make_app(None, broker=url, backend=url, **conf)


@pytest.fixture(
    params=[
        "memory",
        "sqlite",
        pytest.param("redis", marks=pytest.mark.server),
        pytest.param("redis-two-steps", marks=pytest.mark.server),
    ]
)
def app(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        return make_app("memory://")
    if request.param == "sqlite":
        return make_app(request.getfixturevalue("sqlite_url"))
    url = request.getfixturevalue("redis_url")
    return redis_app(url, unique_atomic_publish=request.param == "redis")


class Bodies:
    """What ran, and how many bodies at a time."""

    def __init__(self) -> None:
        self.began: list[Any] = []
        self.most: dict[Any, int] = {}
        self._now: dict[Any, int] = {}
        self._mutex = threading.Lock()
        self.gate = threading.Event()

    def run(self, lane: Any, value: Any) -> Any:
        with self._mutex:
            self.began.append(value)
            self._now[lane] = self._now.get(lane, 0) + 1
            self.most[lane] = max(self.most.get(lane, 0), self._now[lane])
        assert self.gate.wait(30)
        with self._mutex:
            self._now[lane] -= 1
        return value


@pytest.fixture
def bodies() -> Bodies:
    return Bodies()


def lane_task(app: Any, bodies: Bodies, **options: Any) -> Any:
    @app.task(name="shop.work", shared=False, **{**LANE, "unique_on": "lane", **options})
    def work(lane: str, value: int) -> Any:
        return bodies.run(lane, value)

    return work


@pytest.fixture
def released() -> Iterator[list[tuple[str, str]]]:
    """Id and reason of each key that is released."""
    found = []

    def on_released(sender: str, task_id: str, reason: str, **_: Any) -> None:
        found.append((task_id, reason))

    celery_unique.unique_released.connect(on_released)
    yield found
    celery_unique.unique_released.disconnect(on_released)


def parked(app: Any, result: Any) -> list[str]:
    flush(app)
    return state_of(app).store.parked(result.unique_key)


# -- one at a time ------------------------------------------------------------------------


def test_a_call_waits_under_its_own_id_and_runs_in_order(app, bodies):
    work = lane_task(app, bodies)

    results = [work.delay("a", n) for n in range(4)]

    assert [r.outcome for r in results] == ["created", "queued", "queued", "queued"]
    assert not any(r.deduplicated for r in results)
    assert len({r.id for r in results}) == 4
    assert parked(app, results[0]) == [r.id for r in results[1:]]
    bodies.gate.set()
    with working(app, pool="threads", concurrency=3):
        assert [value_of(r) for r in results] == [0, 1, 2, 3]
    assert bodies.began == [0, 1, 2, 3]
    assert bodies.most == {"a": 1}
    flush(app)
    eventually(lambda: not list(state_of(app).store.walk()))


def test_as_many_run_at_a_time_as_the_limit_allows(app, bodies):
    work = lane_task(app, bodies, unique_limit=2)

    with working(app, pool="threads", concurrency=4):
        results = [work.delay("a", n) for n in range(6)]
        eventually(lambda: len(bodies.began) == 2)
        assert [r.outcome for r in results] == ["created"] * 2 + ["queued"] * 4
        bodies.gate.set()
        assert sorted(value_of(r) for r in results) == list(range(6))

    assert bodies.most == {"a": 2}


class Codec:
    """Not a cipher, but nothing that it encodes can be read."""

    def encode(self, text: bytes) -> bytes:
        return text[::-1].hex().encode()

    def decode(self, encoded: bytes) -> bytes:
        return bytes.fromhex(encoded.decode())[::-1]


@pytest.mark.server
@pytest.mark.parametrize("codec", [Codec(), None], ids=["encoded", "in clear text"])
def test_arguments_of_a_parked_call_are_in_the_store_only_without_a_codec(redis_url, bodies, codec):
    app = make_app(redis_url, broker="memory://", unique_follower_codec=codec)
    work = lane_task(app, bodies)
    results = [work.delay("a", value) for value in ("secret 1", "secret 2")]
    assert parked(app, results[0]) == [results[1].id]

    with redis.Redis.from_url(redis_url) as server:
        stored = [server.dump(key) for key in server.scan_iter("cu:*")]
        stored += [repr(server.hgetall(key)).encode() for key in server.scan_iter(_type="hash")]
    bodies.gate.set()
    with working(app):
        assert [value_of(result) for result in results] == ["secret 1", "secret 2"]

    assert (b"secret 2" in b"".join(stored)) is (codec is None)


def test_only_the_first_message_is_in_the_broker(bodies):
    app = make_app("memory://")
    work = lane_task(app, bodies)

    first, *_ = [work.delay("a", n) for n in range(3)]

    assert [sent.id for sent in messages(app)] == [first.id]


def test_a_failure_calls_the_next(app):
    ran = []

    @app.task(name="shop.fail", shared=False, **LANE, unique_by="type")
    def fail(value: int) -> None:
        ran.append(value)
        raise ValueError("it failed")

    results = [fail.delay(n) for n in range(3)]

    with working(app):
        for result in results:
            with pytest.raises(ValueError, match="it failed"):
                value_of(result)
    assert ran == [0, 1, 2]


def test_a_retry_keeps_its_place(app):
    ran = []

    @app.task(name="shop.retry", bind=True, shared=False, **LANE, unique_by="type")
    def work(self: Any, value: int) -> int:
        ran.append(value)
        if ran.count(value) == 1:
            raise self.retry(countdown=0)
        return value

    results = [work.delay(n) for n in range(2)]

    with working(app):
        assert [value_of(r) for r in results] == [0, 1]
    assert ran == [0, 0, 1, 1]


def test_a_task_that_calls_its_own_lane_is_called_after_it(app):
    ran = []

    @app.task(name="shop.again", bind=True, shared=False, **LANE, unique_by="type")
    def work(self: Any, depth: int) -> int:
        if depth:
            self.delay(depth - 1)
        ran.append(depth)
        return depth

    with working(app):
        work.delay(3)
        eventually(lambda: len(ran) == 4)

    assert ran == [3, 2, 1, 0]


# -- the lane of a group ------------------------------------------------------------------


def test_tasks_of_one_group_share_a_lane(app, bodies):
    @app.task(name="user.export", shared=False, **LANE, unique_group="user:{user_id}")
    def export(user_id: int, value: int) -> Any:
        return bodies.run(user_id, value)

    @app.task(name="user.delete", shared=False, **LANE, unique_group="user:{user_id}")
    def delete(user_id: int, value: int) -> Any:
        return bodies.run(user_id, value)

    results = [export.delay(1, 0), delete.delay(1, 1), export.delay(2, 2), delete.delay(1, 3)]

    assert [r.outcome for r in results] == ["created", "queued", "created", "queued"]
    assert results[0].unique_key == results[1].unique_key != results[2].unique_key
    bodies.gate.set()
    with working(app, pool="threads", concurrency=3):
        assert [value_of(r) for r in results] == [0, 1, 2, 3]
    assert bodies.most == {1: 1, 2: 1}


# -- bounds -------------------------------------------------------------------------------


def test_a_call_beyond_max_queue_is_refused(app, bodies):
    work = lane_task(app, bodies, unique_max_queue=2)
    results = [work.delay("a", n) for n in range(3)]

    with pytest.raises(DuplicateTask, match="lane is full: 2 calls are parked") as caught:
        work.delay("a", 3)

    assert caught.value.task_id == results[0].id
    assert str(caught.value).endswith("or raise unique_max_queue or unique_limit")
    pickle.loads(pickle.dumps(caught.value))
    assert work.delay("b", 3).outcome == "created"


@pytest.mark.parametrize("strategy", ["ignore", "reject"])
def test_a_limit_of_three_admits_three(app, strategy):
    work = define(app, unique=True, unique_by="type", unique_limit=3, unique_on_conflict=strategy)
    results = [work.delay(n) for n in range(3)]

    assert [r.outcome for r in results] == ["created"] * 3
    if strategy == "ignore":
        again = work.delay(4)
        assert again.deduplicated
        assert again.id in {r.id for r in results}
    else:
        with pytest.raises(DuplicateTask):
            work.delay(4)


def test_a_limit_of_two_replaces_the_oldest(app):
    work = define(app, unique=True, unique_by="type", unique_limit=2, unique_on_conflict="replace")
    first, second = work.delay(1), work.delay(2)

    third = work.delay(3)

    assert third.outcome == "replaced"
    flush(app)
    record, _ = state_of(app).store.read(third.unique_key)
    assert {second.id, third.id} == set(record.tasks)
    assert record.marks[first.id].kind == "superseded"


def test_a_limit_of_two_reruns_once_both_run(app, bodies):
    work = lane_task(app, bodies, unique_on_conflict="rerun", unique_limit=2)

    with working(app, pool="threads", concurrency=4):
        results = [work.delay("a", n) for n in range(2)]
        eventually(lambda: len(bodies.began) == 2)
        third, fourth = work.delay("a", 2), work.delay("a", 3)
        bodies.gate.set()
        assert [value_of(r) for r in (*results, fourth)] == [0, 1, 3]

    assert [third.outcome, fourth.outcome] == ["rerun", "rerun"]
    assert bodies.began[2:] == [3]


# -- revoke, expires, ETA -----------------------------------------------------------------


def test_a_parked_call_that_is_revoked_never_runs(app, bodies):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]

    second.revoke()

    assert parked(app, first) == [third.id]
    bodies.gate.set()
    with working(app):
        assert value_of(third) == 2
        eventually(lambda: second.state == "REVOKED")
    assert bodies.began == [0, 2]


def test_a_parked_call_that_is_revoked_by_its_id_alone_never_runs(app, bodies):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]
    state_of(app).part(UniqueTaskCoordinator).client.published.clear()

    app.control.revoke(second.id)

    assert parked(app, first) == [third.id]


def test_a_revoked_holder_calls_the_next(app, bodies):
    work = lane_task(app, bodies)
    first, second = [work.delay("a", n) for n in range(2)]

    first.revoke()

    eventually(lambda: parked(app, first) == [])
    bodies.gate.set()
    with working(app):
        assert value_of(second) == 1
    assert bodies.began == [1]


def test_a_parked_call_expires_while_it_waits(app, bodies):
    work = lane_task(app, bodies)
    with working(app):
        first = work.delay("a", 0)
        eventually(lambda: bodies.began == [0])
        second = work.apply_async(("a", 1), expires=0.2)
        third = work.delay("a", 2)
        threading.Event().wait(0.3)  # its expiry is a time of the wall clock
        bodies.gate.set()
        assert value_of(third) == 2
        eventually(lambda: second.state == "REVOKED")
    assert bodies.began == [0, 2]
    assert value_of(first) == 0


def test_a_parked_call_of_a_task_that_the_worker_does_not_know_fails_and_calls_the_next(
    app, bodies
):
    bodies.gate.set()
    work = lane_task(app, bodies, unique_on=None, unique_group="all")
    gone = define(app, "shop.gone", **LANE, unique_group="all")
    first, second, third = work.delay("a", 0), gone.delay(1), work.delay("a", 2)
    assert [r.outcome for r in (first, second, third)] == ["created", "queued", "queued"]
    app.tasks.pop("shop.gone")

    with working(app):
        assert [value_of(first), value_of(third)] == [0, 2]
        eventually(lambda: second.state == "FAILURE")


@pytest.mark.server
def test_a_parked_call_that_expires_ends_although_rabbitmq_would_drop_its_message(
    rabbitmq_url, redis_url, bodies
):
    app = make_app(redis_url, broker=rabbitmq_url, backend=redis_url, worker_prefetch_multiplier=1)
    work = lane_task(app, bodies)

    @app.task(name="shop.other", shared=False)
    def other() -> None:
        threading.Event().wait(0.5)

    with working(app, pool="threads", concurrency=1):
        first = work.delay("a", 0)
        eventually(lambda: bodies.began == [0])
        second = work.apply_async(("a", 1), expires=0.2)
        third = work.delay("a", 2)
        for _ in range(3):  # its prefetch is full when the second call has its turn
            other.delay()
        threading.Event().wait(0.3)  # its expiry is a time of the wall clock
        bodies.gate.set()

        assert [value_of(first), value_of(third)] == [0, 2]
        with pytest.raises(TaskRevokedError, match="expired"):
            value_of(second)
    assert bodies.began == [0, 2]


def test_the_countdown_of_a_parked_call_begins_when_it_is_made(app, bodies):
    work = lane_task(app, bodies)
    first = work.delay("a", 0)
    second = work.apply_async(("a", 1), countdown=3600)

    flush(app)
    record, now = state_of(app).store.read(first.unique_key)
    advance(app, 1800)
    state_of(app).store.cancel(first.unique_key, first.id, 1000)
    [called] = state_of(app).store.reap(first.unique_key, "w", 1000)

    assert called.follower_id == second.id
    record, now = state_of(app).store.read(first.unique_key)
    task = record.tasks[second.id]
    assert task.eta - now == pytest.approx(1_800_000, abs=20_000)


# -- canvas -------------------------------------------------------------------------------


def test_members_of_a_chord_in_one_lane_all_run(app, bodies):
    work = lane_task(app, bodies, unique_limit=2)
    bodies.gate.set()

    @app.task(name="shop.total", shared=False)
    def total(values: list[int]) -> int:
        return sum(values)

    app.set_current()
    with working(app, pool="threads", concurrency=4):
        result = chord([work.s("a", n) for n in range(10)])(total.s())
        assert value_of(result) == 45

    assert bodies.most["a"] <= 2


def test_links_of_a_chain_in_one_lane_do_not_wait_for_themselves(app):
    ran = []

    @app.task(name="shop.add", shared=False, **LANE, unique_by="type")
    def add(value: int) -> int:
        ran.append(value)
        return value + 1

    app.set_current()
    with working(app):
        results = [chain(add.s(n), add.s(), add.s()).apply_async() for n in (0, 10)]
        assert [value_of(r) for r in results] == [3, 13]
    assert sorted(ran) == [0, 1, 2, 10, 11, 12]


def test_members_of_a_group_and_callbacks_work(app):
    seen = []

    @app.task(name="shop.note", shared=False)
    def note(value: int) -> None:
        seen.append(value)

    @app.task(name="shop.one", shared=False, **LANE, unique_by="type")
    def one(value: int) -> int:
        return value

    app.set_current()
    with working(app):
        result = group(one.s(n).set(link=note.s()) for n in range(4)).apply_async()
        assert value_of(result) == [0, 1, 2, 3]
        eventually(lambda: sorted(seen) == [0, 1, 2, 3])


def test_a_parked_call_is_no_child_of_the_task_before_it(app):
    parents = []

    @app.task(name="shop.family", bind=True, shared=False, **LANE, unique_by="type")
    def work(self: Any, value: int) -> None:
        parents.append((self.request.id, self.request.parent_id, self.request.root_id))

    results = [work.delay(n) for n in range(3)]

    with working(app):
        [value_of(r) for r in results]
    assert parents == [(r.id, None, r.id) for r in results]


def test_apply_many_parks_in_order(app, bodies):
    work = lane_task(app, bodies)
    bodies.gate.set()

    results = celery_unique.apply_many(work.s("a", n) for n in range(5))

    assert [r.outcome for r in results] == ["created", *["queued"] * 4]
    with working(app, pool="threads", concurrency=3):
        assert [value_of(r) for r in results] == list(range(5))
    assert bodies.began == list(range(5))


def test_a_call_by_name_and_send_task_park(app, bodies):
    lane_task(app, bodies)

    results = [app.send_task("shop.work", ("a", n)) for n in range(2)]

    assert [r.outcome for r in results] == ["created", "queued"]


def test_beat_parks_too(app, bodies):
    work = lane_task(app, bodies)
    first = work.delay("a", 0)
    scheduler = beat.Scheduler(app, lazy=True)
    entry = scheduler.Entry(name="e", task="shop.work", args=("a", 1), schedule=60, app=app)

    ticks = [scheduler.apply_async(entry, advance=False) for _ in range(2)]

    assert [tick.outcome for tick in ticks] == ["queued", "queued"]
    assert parked(app, first) == [tick.id for tick in ticks]


def test_a_link_whose_lane_is_full_fails_and_the_rest_goes_on(app, bodies):
    work = lane_task(app, bodies, unique_max_queue=1)

    @app.task(name="shop.hello", shared=False)
    def hello() -> str:
        return "hello"

    app.set_current()
    first, second = [work.delay("a", n) for n in range(2)]
    with working(app, pool="threads", concurrency=3):
        refused = chain(hello.si(), work.si("a", 2)).apply_async()
        eventually(lambda: refused.state == "FAILURE")
        bodies.gate.set()
        assert [value_of(first), value_of(second)] == [0, 1]

    assert value_of(refused.parent) == "hello"
    assert "its lane is full" in str(refused.result)
    assert bodies.began == [0, 1]


@pytest.mark.server
def test_lanes_with_rabbitmq_as_the_broker(rabbitmq_url, redis_url, bodies):
    app = make_app(redis_url, broker=rabbitmq_url, backend=redis_url)
    work = lane_task(app, bodies)
    bodies.gate.set()

    results = [work.delay("a", n) for n in range(6)]

    assert Counter(r.outcome for r in results) == {"created": 1, "queued": 5}
    with working(app, pool="threads", concurrency=3):
        assert [value_of(r) for r in results] == list(range(6))
    assert bodies.began == list(range(6))
    assert bodies.most == {"a": 1}


def test_an_idempotency_key_makes_a_duplicate_and_not_a_parked_call(app, bodies):
    work = lane_task(app, bodies)

    results = [work.apply_async(("a", 1), idempotency_key="k") for _ in range(2)]

    assert results[0].id == results[1].id
    assert results[1].outcome == "deduplicated"


def test_the_same_id_is_parked_once(app, bodies):
    work = lane_task(app, bodies)
    first = work.delay("a", 0)

    results = [work.apply_async(("a", 1), task_id="mine") for _ in range(2)]

    assert [r.outcome for r in results] == ["queued", "queued"]
    assert parked(app, first) == ["mine"]


# -- crashes ------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [25, 28 * 24], ids=["a day", "four weeks without a worker"])
def test_a_parked_call_is_called_once_the_lease_of_its_holder_lapses(app, bodies, hours):
    work = lane_task(app, bodies)
    first, second = [work.delay("a", n) for n in range(2)]
    flush(app)

    advance(app, hours * 3600)  # longer than a message waits in the broker

    assert state_of(app).store.due() == [first.unique_key]
    assert reap_orphans(state_of(app), first.unique_key)
    flush(app)
    record, _ = state_of(app).store.read(first.unique_key)
    assert set(record.tasks) == {second.id}
    assert record.following is None


def test_a_call_whose_publisher_died_is_published_again(app, bodies):
    work = lane_task(app, bodies)
    first, second = [work.delay("a", n) for n in range(2)]
    store = state_of(app).store
    flush(app)
    store.cancel(first.unique_key, first.id, 3_600_000)
    [orphan] = store.reap(first.unique_key, "dies", 60_000)  # and publishes nothing
    assert orphan.follower_id == second.id

    advance(app, 120)  # beyond the grace

    assert reap_orphans(state_of(app), first.unique_key)
    bodies.gate.set()
    with working(app):
        assert value_of(second) == 1
    assert bodies.began == [1]


# -- policies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"unique_limit": 0}, "limit"),
        ({"unique_limit": -1}, "limit"),
        ({"unique_limit": True}, "limit"),
        ({"unique_limit": "3"}, "limit"),
        ({"unique_limit": 1.5}, "limit"),
        ({"unique_max_queue": 5}, "max_queue"),
        ({"unique_max_queue": 0, "unique_on_conflict": "queue"}, "max_queue"),
        ({"unique_max_queue": 5, "unique_on_conflict": "ignore"}, "max_queue"),
        ({"unique_group": "g", "unique_on": "shop_id"}, "group"),
        ({"unique_group": "g", "unique_by": "type"}, "group"),
        ({"unique_group": "g", "unique_by": ["type", "args"]}, "group"),
        ({"unique_group": "g", "unique_key": "{shop_id}"}, "group"),
        ({"unique_group": ""}, "group"),
        ({"unique_group": 7}, "group"),
        ({"unique_group": "{shop_id"}, "group"),
        ({"unique_group": "{nobody}"}, "group"),
    ],
)
def test_a_wrong_option_names_field_and_cure(options, field):
    app = make_app("memory://")

    with pytest.raises(InvalidPolicy) as caught:
        define(app, unique=True, **options).delay(1)
    assert caught.value.field == field
    assert f"unique_{field}" in str(caught.value) or "argument" in str(caught.value)

    plain = define(app, "shop.plain")
    with pytest.raises(InvalidPolicy):
        plain.apply_async((1,), unique=True, **options)


def test_options_of_a_call_replace_those_of_the_task():
    app = make_app("memory://")
    work = define(app, unique=True, unique_on="shop_id")

    first = work.apply_async((1,), unique_group="shops", unique_on_conflict="queue")
    second = work.apply_async((2,), unique_group="shops", unique_on_conflict="queue")
    third = work.apply_async((2,))

    assert [first.outcome, second.outcome, third.outcome] == ["created", "queued", "created"]


def test_a_policy_with_a_lane_has_no_ojs_document():
    for fields in ({"group": "g"}, {"limit": 2}, {"on_conflict": "queue"}):
        with pytest.raises(InvalidPolicy, match="Open Job Spec"):
            UniquePolicy(**fields).to_ojs()
    policy = UniquePolicy(on_conflict="queue", limit=2, max_queue=3, group="{a}")
    assert UniquePolicy(**policy.as_fields()) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_an_eager_call_is_not_parked():
    app = make_app("memory://", task_always_eager=True, unique_eager=True)
    work = define(app, **LANE)
    app.conf.task_always_eager = False
    first = work.delay(1)
    app.conf.task_always_eager = True

    with pytest.raises(DuplicateTask):
        work.delay(1)

    assert state_of(app).store.parked(first.unique_key) == []


def test_results_of_rpc_reach_the_caller_of_a_parked_call(bodies):
    app = make_app("memory://", backend="rpc://")
    work = lane_task(app, bodies)
    bodies.gate.set()

    results = [work.delay("a", n) for n in range(3)]

    with working(app):
        assert [r.get(timeout=30) for r in results] == [0, 1, 2]


# -- what operators see ---------------------------------------------------------------------


def unique(app: Any, *arguments: str) -> str:
    """The output of ``celery -A app unique ...``."""
    from click.testing import CliRunner

    from celery_unique.cli import unique as command

    context = SimpleNamespace(app=app, no_color=True)
    done = CliRunner().invoke(command, [*arguments], obj=context, catch_exceptions=False)
    return done.output


#: Commands see no locks in the memory of another process.
SEEN = ["sqlite", pytest.param("redis", marks=pytest.mark.server)]


@pytest.mark.parametrize("app", SEEN, indirect=True)
def test_a_released_holder_calls_the_next_and_the_operator_knows(app, bodies):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]
    flush(app)

    said = unique(app, "release", "--task", "shop.work", "--dry-run")
    assert "2 calls are parked under these keys: they stay parked" in " ".join(said.split())
    unique(app, "release", "--task", "shop.work", "--yes")

    assert parked(app, first) == [second.id, third.id]
    assert state_of(app).store.due() == [first.unique_key]
    reap_orphans(state_of(app), first.unique_key)
    assert parked(app, first) == [third.id]
    bodies.gate.set()
    with working(app):
        assert [value_of(r) for r in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize("app", SEEN, indirect=True)
def test_operators_see_how_many_are_parked_and_where_a_call_is(app, bodies):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]
    flush(app)

    lock = celery_unique.lookup(work, ("a", 0))
    assert lock is not None
    assert (lock.task_id, lock.parked) == (first.id, 2)
    waits_for = celery_unique.lookup(task_id=third.id, app=app)
    assert waits_for is not None
    assert (waits_for.task_id, waits_for.position) == (first.id, 2)
    [listed] = [json.loads(line) for line in unique(app, "list", "--json").splitlines()]
    assert listed["parked"] == 2
    assert "shop.work (+2 parked)" in unique(app, "list")
    shown = json.loads(unique(app, "show", third.id, "--json"))
    assert shown["parked"] == [
        {"position": 1, "task_id": second.id},
        {"position": 2, "task_id": third.id},
    ]
    assert f"position 2  {third.id}" in unique(app, "show", third.id)
    why = " ".join(unique(app, "why", third.id).split())
    assert f"Call {third.id} is at position 2, and runs when its turn comes" in why
    why = unique(app, "why", "shop.work", "--args", '["a", 9]')
    assert "is parked at position 3, and runs when its turn comes" in why
    assert "2 calls are parked" in why
    assert json.loads(unique(app, "stats", "--json"))["parked"] == 2
    assert "2 calls parked" in unique(app, "stats")


@pytest.mark.parametrize("app", SEEN, indirect=True)
def test_a_list_by_the_id_of_a_parked_call_shows_what_it_waits_for_and_its_position(app, bodies):
    work = lane_task(app, bodies)
    first, _, third = [work.delay("a", n) for n in range(3)]
    flush(app)

    [listed] = [
        json.loads(line)
        for line in unique(app, "list", "--task-id", third.id, "--json").splitlines()
    ]
    assert (listed["task_id"], listed["parked"], listed["position"]) == (first.id, 2, 2)
    said = unique(app, "list", "--task-id", third.id)
    assert "(+2 parked, the call at position 2)" in said
    found = find_page(state_of(app), Wanted(text=third.id))
    assert [(lock.task_id, lock.position) for lock in found.locks] == [(first.id, 2)]
    assert unique(app, "list", "--task-id", first.id, "--json").count("\n") == 1


@pytest.mark.parametrize("app", SEEN, indirect=True)
@pytest.mark.parametrize("since", ["a release", "its lease has lapsed", "its publisher died"])
def test_calls_that_are_parked_under_a_key_that_no_task_holds_are_seen(app, bodies, since):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]
    flush(app)
    store = state_of(app).store
    if since == "a release":
        assert celery_unique.release(work, ("a", 0))
    elif since == "its publisher died":
        store.cancel(first.unique_key, first.id, 3_600_000)
        assert store.reap(first.unique_key, "dies", 60_000)  # and publishes nothing
        advance(app, 120)
    else:
        advance(app, 25 * 3600)

    lock = celery_unique.lookup(work, ("a", 0))
    assert (lock.task_id, lock.state, lock.parked, lock.position) == ("", "parked", 2, 0)
    for position, result in enumerate((second, third), 1):
        waits = celery_unique.lookup(task_id=result.id, app=app)
        assert (waits.key, waits.state, waits.position) == (lock.key, "parked", position)
    [listed] = [json.loads(line) for line in unique(app, "list", "--json").splitlines()]
    assert (listed["key"], listed["state"], listed["parked"]) == (lock.key, "parked", 2)
    assert "(+2 parked)" in unique(app, "list", "--state", "parked")
    assert "(+2 parked, the call at position 2)" in unique(app, "list", "--task-id", third.id)
    for text, position in (("", 0), (third.id, 2), (lock.key, 0)):
        found = find_page(state_of(app), Wanted(text=text))
        assert [(one.state, one.position) for one in found.locks] == [("parked", position)]
    why = unique(app, "why", third.id)
    assert "The key is free" not in why
    assert "No task holds the key" in why
    assert not unique(app, "list", "--task-id", "no such id", "--json")


def test_the_test_kit_shows_parked_calls():
    app = make_app("memory://")
    work = define(app, **LANE)
    with locks_in_memory(app) as locks:
        first, second = work.delay(1), work.delay(1)
        assert_queued(second)
        assert locks.parked(work, (1,)) == [second.id]

        locks.end(first)

        assert locks.parked(work, (1,)) == []
        locks.assert_held(work, (1,), by=second)


def test_signals_and_logs_of_a_lane(app, bodies, caplog):
    work = lane_task(app, bodies)
    conflicts, acquired = [], []

    def on_conflict(sender: str, on_conflict: str, **facts: Any) -> None:
        conflicts.append((sender, on_conflict, facts["task_id"]))

    def on_acquired(sender: str, task_id: str, **facts: Any) -> None:
        acquired.append(task_id)

    celery_unique.unique_conflict.connect(on_conflict)
    celery_unique.unique_acquired.connect(on_acquired)
    try:
        with caplog.at_level("INFO", logger="celery_unique"):
            first, second = [work.delay("a", n) for n in range(2)]
        assert conflicts == [("shop.work", "queue", first.id)]
        assert f"parked shop.work[{second.id}] at position 1 of its lane" in caplog.text
        bodies.gate.set()
        with working(app):
            value_of(second)
        assert acquired == [first.id, second.id]
    finally:
        celery_unique.unique_conflict.disconnect(on_conflict)
        celery_unique.unique_acquired.disconnect(on_acquired)


@pytest.mark.server
@pytest.mark.parametrize("append_only", [True, False])
def test_a_redis_that_restarts_keeps_parked_calls_only_with_persistence(start_server, append_only):
    server = start_server(RedisServer, append_only=append_only)
    store = open_store(server.url, timeout_s=10)
    key = fresh_key()
    for task_id in "abc":
        claim = Claim(task_id, "shop.work", "pswrt", 30_000, "queue", join=f"message of {task_id}")
        store.acquire(key, claim)

    server.restart()

    assert store.parked(key) == (["b", "c"] if append_only else [])
    store.close()


def test_with_concealed_holders_a_parked_call_is_not_told_the_state_of_its_holder(bodies):
    app = make_app("memory://", unique_conceal_holder=True)
    work = lane_task(app, bodies)

    _, second = [work.delay("a", n) for n in range(2)]

    assert (second.outcome, second.holder_state) == ("queued", None)


# -- costs and faults -----------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.parametrize("atomic", [True, False])
def test_a_call_that_waits_costs_four_commands(redis_url, bodies, report, atomic):
    app = redis_app(redis_url, unique_atomic_publish=atomic)
    work = lane_task(app, bodies)
    number = 20

    def scripts_run() -> int:
        with redis.Redis.from_url(redis_url) as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))

    with working(app):
        bodies.gate.set()
        [
            value_of(r) for r in [work.delay("warm", n) for n in range(3)]
        ]  # the server knows the scripts
        bodies.gate.clear()
        bodies.began.clear()
        first = work.delay("a", 0)
        eventually(lambda: bodies.began == [0])
        flush(app)
        before = scripts_run()
        results = [work.delay("a", n) for n in range(1, number + 1)]
        bodies.gate.set()
        assert [value_of(r) for r in (first, *results)] == list(range(number + 1))
    flush(app)
    cost = (scripts_run() - before) / number
    report(f"lanes: {cost:.2f} commands of the store for each call that waited")
    assert cost <= 4.2  # with the end of the first one, and now and then a renewal


def test_a_call_that_cannot_be_published_keeps_its_place(app, bodies, monkeypatch):
    work = lane_task(app, bodies)
    first, second, third = [work.delay("a", n) for n in range(3)]
    bodies.gate.set()
    publish, failed = FollowerCall.publish, threading.Event()

    def refused(call: FollowerCall, app: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the broker is down")
        publish(call, app)

    monkeypatch.setattr(FollowerCall, "publish", refused)
    with working(app):
        assert value_of(first) == 0
        eventually(failed.is_set)
        assert parked(app, first) == [third.id]
        advance(app, 120)  # beyond the grace
        eventually(lambda: reap_orphans(state_of(app), first.unique_key) or second.ready())
        assert [value_of(second), value_of(third)] == [1, 2]
    assert bodies.began == [0, 1, 2]


@pytest.mark.parametrize("held", ["by a call before", "by a call just made"])
def test_a_queue_that_does_not_exist_is_an_error_at_the_call(app, bodies, held):
    app.conf.task_create_missing_queues = False
    app.conf.task_queues = [Queue(app.conf.task_default_queue)]
    work = lane_task(app, bodies)
    first = work.delay("a", 0)
    if held == "by a call before":  # else the next call does not ask for the key alone
        state_of(app).part(UniqueTaskCoordinator).client.taken_until.clear()

    with pytest.raises(QueueNotFound, match="nope"):
        work.apply_async(("a", 1), queue="nope")

    assert parked(app, first) == []


def test_a_call_whose_queue_is_gone_fails_in_its_turn_and_the_lane_goes_on(
    app, bodies, caplog, released
):
    app.conf.task_create_missing_queues = False
    app.conf.task_queues = [Queue(app.conf.task_default_queue), Queue("old")]
    work, failed = lane_task(app, bodies), threading.Event()

    @app.task(name="shop.note", shared=False)
    def note(*_: Any) -> None:
        failed.set()

    first = work.delay("a", 0)
    second = work.apply_async(("a", 1), queue="old", link_error=note.si())
    third = work.delay("a", 2)
    assert (second.outcome, third.outcome) == ("queued", "queued")
    del app.amqp.queues["old"]

    bodies.gate.set()
    with working(app):
        assert value_of(first) == 0
        eventually(lambda: parked(app, first) == [third.id])
        advance(app, 120)  # beyond the grace: no other worker has published it
        reap_orphans(state_of(app), first.unique_key)
        with pytest.raises(QueueNotFound):
            value_of(second)
        assert value_of(third) == 2
        eventually(failed.is_set)

    assert f"failed parked shop.work[{second.id}]" in caplog.text
    assert (second.id, "discarded") in released


class OtherCodec(Codec):
    def decode(self, encoded: bytes) -> bytes:
        raise ValueError("encoded with an older key")


@pytest.mark.server
@pytest.mark.parametrize("wrong", ["content type", "codec"])
def test_a_call_that_no_worker_can_read_fails_in_its_turn_and_the_lane_goes_on(
    redis_url, bodies, wrong
):
    codecs = (Codec(), OtherCodec()) if wrong == "codec" else (None, None)
    caller, app = (redis_app(redis_url, unique_follower_codec=codec) for codec in codecs)
    app.conf.task_default_queue = caller.conf.task_default_queue
    work = lane_task(caller, bodies)
    lane_task(app, bodies)
    serializer = "json" if wrong == "codec" else "pickle"
    first, second = (
        work.apply_async(("a", n), serializer=serializer if n else "json") for n in range(2)
    )

    bodies.gate.set()
    with working(app):
        assert value_of(first) == 0
        eventually(lambda: parked(caller, first) == [])
        advance(app, 120)
        reap_orphans(state_of(app), first.unique_key)
        with pytest.raises(ValueError if wrong == "codec" else ContentDisallowed):
            value_of(second)
        third = work.delay("a", 2)
        assert value_of(third) == 2

    assert bodies.began == [0, 2]


@pytest.mark.server
def test_a_stale_holder_is_released_by_a_later_call_of_its_lane(redis_url, bodies):
    app = redis_app(redis_url)
    work = lane_task(app, bodies, ignore_result=True)
    first, second = [work.delay("a", n) for n in range(2)]
    app.control.purge()
    flush(app)
    advance(app, 61)

    third = work.delay("a", 2)

    assert third.outcome == "queued"
    reap_orphans(state_of(app), first.unique_key)
    assert parked(app, first) == [third.id]
    bodies.gate.set()
    with working(app):
        eventually(lambda: bodies.began == [1, 2])
    assert second.outcome == "queued"


@pytest.mark.server
def test_a_stale_holder_is_released_by_a_worker_if_no_call_comes(redis_url, bodies):
    app = redis_app(redis_url)
    work = lane_task(app, bodies, ignore_result=True)
    first, second = [work.delay("a", n) for n in range(2)]
    app.control.purge()
    flush(app)
    reaper = Reaper(state_of(app))
    reaper.reap()
    assert parked(app, first) == [second.id]

    advance(app, 61)
    reaper.reap()

    assert parked(app, first) == []
    bodies.gate.set()
    with working(app):
        eventually(lambda: bodies.began == [1])
