"""Redis Cluster: several nodes at once, slots that move, nodes that fail over or hang."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.record import MARKS_INLINE
from celery_unique.stores.redis import ClusterStore
from celery_unique.stores.redis.layout import BUCKETS, Layout
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    record_of,
    run,
    running,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S, after_all, unavailable_within
from tests.support import RedisCluster, RedisServer, eventually
from tests.support.redis_groups import ask
from tests.support.server import HOST, free_port

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stores-redis.md"
TIMEOUT_S = 0.6
#: What a test run on a busy machine may add to a time-out.
SLACK_S = 1.0

pytestmark = pytest.mark.server


@pytest.fixture
def store(cluster_url: str) -> Iterator[ClusterStore]:
    patient = ClusterStore.from_url(cluster_url, namespace=fresh_key(), timeout_s=PATIENCE_S)
    with closing(patient) as store:
        yield store


@pytest.fixture
def cluster(start_server: Callable[..., Any]) -> RedisCluster:
    """One of this test's own, to be broken."""
    started: RedisCluster = start_server(RedisCluster)
    return started


def keys_everywhere(number: int = BUCKETS) -> list[str]:
    """Keys of as many buckets, so that every node has some."""
    return [f"1:{n % 256:02x}{fresh_key()[2:]}" for n in range(number)]


def slot_of(store: ClusterStore, key: str) -> int:
    return int(key_slot(store._layout.name_of(key).encode()))


def key_on(cluster: RedisCluster, server: RedisServer) -> str:
    """A key whose record lies on this primary, of a store without namespace."""
    layout = Layout("", "")
    return next(
        key
        for key in keys_everywhere()
        if cluster.owner_of(key_slot(layout.name_of(key).encode())) is server
    )


# -- several nodes at once ----------------------------------------------------------------------


def test_a_batch_reaches_every_node_and_keeps_its_order(store, redis_cluster):
    keys = keys_everywhere(700)
    claims = [(key, claim(f"first {key}")) for key in keys]
    claims += [(key, claim(f"second {key}")) for key in keys]

    replies = store.acquire_many(claims)

    assert [reply.outcome for reply in replies[:700]] == ["created"] * 700
    assert [reply.holder and reply.holder.task_id for reply in replies[700:]] == [
        f"first {key}" for key in keys
    ]
    slots = {slot_of(store, key) for key in keys}
    assert len({redis_cluster.owner_of(slot).port for slot in slots}) == 3
    assert store.renew([running(key, "nobody") for key in keys]) == [False] * 700


def test_walk_and_one_way_acts_reach_every_node(store):
    keys = keys_everywhere(300)
    store.acquire_many([(key, claim("a")) for key in keys])

    for key in keys:
        store.confirm(key, "a", QUEUE_LEASE)
    store.flush()

    walked = dict(store.walk(batch=20))
    assert sorted(walked) == sorted(keys)
    assert {record.tasks["a"].state for record in walked.values()} == {"w"}


def test_every_node_is_sent_a_script_that_it_has_lost(store, redis_cluster):
    keys = keys_everywhere()
    for key in keys:
        publish(store, key, "a")
    for server in redis_cluster.primaries():
        ask(server, "SCRIPT", "FLUSH")

    assert {store.start(key, start("a")).verdict for key in keys} == {"run"}
    for server in redis_cluster.primaries():
        ask(server, "SCRIPT", "FLUSH")
    assert store.renew([running(key, "a") for key in keys]) == [True] * len(keys)


# -- slots that move ------------------------------------------------------------------------------


@contextmanager
def moving(cluster: RedisCluster, slot: int) -> Iterator[Callable[[], None]]:
    """A slot in the middle of a move: what ends it is given; at the end it is back again."""
    source = cluster.owner_of(slot)
    target = next(server for server in cluster.primaries() if server is not source)
    end_move = cluster.move_slot(slot, source, target)
    yield end_move
    end_move()
    cluster.move_slot(slot, target, source)()


def test_acts_follow_a_slot_that_is_being_moved_and_has_moved(store, redis_cluster, caplog):
    bucket = fresh_key()[:4]
    keys = [bucket + fresh_key()[4:] for _ in range(4)]
    publish(store, keys[0], "a")
    store.acquire(keys[1], claim("a"))

    with (
        caplog.at_level(logging.WARNING),
        moving(redis_cluster, slot_of(store, keys[0])) as end_move,
    ):
        while_moving = [reply.outcome for reply in store.acquire_many(pairs(keys[:3]))]
        store.confirm(keys[1], "a", QUEUE_LEASE)
        store.flush()
        confirmed = task_of(store, keys[1], "a").state
        end_move()
        moved = [reply.outcome for reply in store.acquire_many(pairs(keys))]
        store.start(keys[0], start("a"))
        store.retry(keys[0], "a", "d1", QUEUE_LEASE, False)
        store.flush()
        retried = task_of(store, keys[0], "a").state
        walked = {key for key, _ in store.walk()}

    assert while_moving == ["duplicate", "duplicate", "created"]
    assert moved == ["duplicate", "duplicate", "duplicate", "created"]
    assert (confirmed, retried) == ("w", "t")
    assert walked == set(keys)
    assert not store.failovers.noticed
    assert caplog.text == ""


def test_acts_on_a_key_with_followers_follow_its_slot_too(store, redis_cluster):
    key = fresh_key()
    run(store, key, "a")
    assert store.acquire(key, claim("f1", join="message 1")).outcome == "joined"

    with moving(redis_cluster, slot_of(store, key)) as end_move:
        duplicate = store.acquire(key, claim("b")).outcome
        joined = store.acquire(key, claim("f2", join="message 2")).outcome
        renewed = store.renew([running(key, "a")])
        end_move()
        again = store.acquire(key, claim("f3", join="message 3")).outcome
        finished = store.finish(key, finish("a"))

    assert (duplicate, joined, renewed, again) == ("duplicate", "joined", [3], "joined")
    assert finished.verdict == "ended"
    assert [follower_id for follower_id, _ in store.followers(key)] == ["f1", "f2", "f3"]


def test_acts_on_a_key_with_marks_beside_its_record_follow_its_slot_too(store, redis_cluster):
    key, followed = fresh_key(), fresh_key()
    followed = key[:4] + followed[4:]  # in the same slot
    publish(store, key, "a")
    publish(store, followed, "a")
    for number in range(MARKS_INLINE + 5):
        store.cancel(key, f"revoked {number}", QUEUE_LEASE)
        store.cancel(followed, f"revoked {number}", QUEUE_LEASE)
    assert store.acquire(followed, claim("f1", join="message")).outcome == "joined"

    with moving(redis_cluster, slot_of(store, key)) as end_move:
        duplicate = store.acquire(key, claim("b")).outcome
        dropped = store.start(key, start(f"revoked {MARKS_INLINE + 1}")).mark
        dropped_too = store.start(followed, start(f"revoked {MARKS_INLINE + 1}")).mark
        store.cancel(key, "revoked meanwhile", QUEUE_LEASE)
        members = [follower_id for follower_id, _ in store.followers(followed)]
        end_move()
        after = store.start(key, start(f"revoked {MARKS_INLINE + 2}")).mark
        meanwhile = store.start(key, start("revoked meanwhile")).mark

    assert (duplicate, dropped, dropped_too) == ("duplicate", "revoked", "revoked")
    assert (members, after, meanwhile) == (["f1"], "revoked", "revoked")
    assert store.read(key)[0].more_marks == 6


def test_a_key_that_gets_too_many_marks_while_its_slot_moves_keeps_them_in_its_record(
    store, redis_cluster
):
    """The hash for them does not exist, and may not be named then."""
    key = fresh_key()
    publish(store, key, "a")
    ids = [f"revoked {number}" for number in range(MARKS_INLINE + 3)]
    for task_id in ids[:MARKS_INLINE]:
        store.cancel(key, task_id, QUEUE_LEASE)

    with moving(redis_cluster, slot_of(store, key)) as end_move:
        for task_id in ids[MARKS_INLINE:]:
            store.cancel(key, task_id, QUEUE_LEASE)
        end_move()

    assert {store.start(key, start(task_id)).mark for task_id in ids} == {"revoked"}


def pairs(keys: list[str]) -> list[tuple[str, Any]]:
    return [(key, claim(f"b of {key}")) for key in keys]


def test_calls_go_on_without_an_error_while_slots_move(store, redis_cluster):
    bucket = fresh_key()[:4]
    over = threading.Event()

    def call_and_call(number: int) -> list[str]:
        outcomes = []
        while not over.is_set():
            key = bucket + fresh_key()[4:]
            outcomes.append(store.acquire(key, claim("a")).outcome)
            outcomes.append(store.acquire(key, claim("b")).outcome)
        return outcomes

    with ThreadPoolExecutor(4) as threads:
        calling = [threads.submit(call_and_call, number) for number in range(4)]
        for _ in range(3):
            with moving(redis_cluster, slot_of(store, bucket)) as end_move:
                end_move()
        over.set()
        told = [outcome for future in calling for outcome in future.result()]

    assert told.count("created") == told.count("duplicate") > 0


# -- nodes that fail over, hang or are gone -----------------------------------------------------


def test_a_primary_that_dies_is_followed_by_its_replica_and_that_is_said(cluster, caplog):
    store = ClusterStore.from_url(cluster.url, timeout_s=10)
    keys = keys_everywhere()
    for key in keys:
        publish(store, key, "a")
    cluster.wait_until_replicated()
    old = cluster.primaries()[0]
    with old.client() as client:
        client.wait(1, 20_000)  # nothing is on its way to the replica any more

    with caplog.at_level(logging.WARNING):
        new = cluster.fail_over(old, kill=True)
        replies = store.acquire_many([(key, claim("b")) for key in keys])
        for key in keys:
            store.start(key, start("a"))
            store.retry(key, "a", "d1", QUEUE_LEASE, False)
        store.flush()

    assert {reply.outcome for reply in replies} == {"duplicate"}
    assert {record.tasks["a"].state for _, record in store.walk()} == {"t"}
    [noticed] = store.failovers.noticed
    assert (noticed.before, noticed.after) == (f"{HOST}:{old.port}", f"{HOST}:{new.port}")
    assert caplog.text.count("failed over from") == 1
    facts = {each.server: each for each in store.servers()}
    assert facts[noticed.after].was_promoted
    assert [each.replicas for each in facts.values()].count(0) == 1
    store.ping()
    store.close()


def test_one_way_acts_outlast_a_fail_over_that_takes_longer_than_the_time_out(cluster):
    store = ClusterStore.from_url(cluster.url, timeout_s=TIMEOUT_S)
    old = cluster.primaries()[0]
    key = key_on(cluster, old)
    after_all(lambda: store.acquire(key, claim("a")))
    with old.client() as client:
        client.wait(1, 20_000)
    replica = cluster.replica_of(old)

    old.kill()
    with pytest.raises(StoreUnavailable, match="fail-over may be under way"):
        store.acquire(key, claim("b"))
    with pytest.raises(StoreUnavailable):
        store.ping()
    store.confirm(key, "a", QUEUE_LEASE)
    ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")

    def is_confirmed() -> bool:
        return record_of(store, key).tasks["a"].state == "w"

    eventually(is_confirmed, timeout=30, ignoring=StoreUnavailable)
    store.close()


def test_a_primary_that_hangs_is_given_up_in_time_and_left_once_it_is_replaced(cluster):
    store = ClusterStore.from_url(cluster.url, timeout_s=TIMEOUT_S)
    old = cluster.primaries()[0]
    key = key_on(cluster, old)
    elsewhere = key_on(cluster, cluster.primaries()[1])
    with closing(ClusterStore.from_url(cluster.url, timeout_s=PATIENCE_S)) as patient:
        for each in (key, elsewhere):
            publish(patient, each, "a")
    after_all(store.ping)
    with old.client() as client:
        client.wait(1, 20_000)
    replica = cluster.replica_of(old)

    old.sigstop()
    unavailable_within(TIMEOUT_S + SLACK_S, lambda: store.acquire(key, claim("b")), match="in time")
    ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
    here = eventually(
        lambda: store.acquire(key, claim("b")).outcome, timeout=30, ignoring=StoreUnavailable
    )
    there = after_all(lambda: store.acquire(elsewhere, claim("b")).outcome)
    old.sigcont()

    assert (here, there) == ("duplicate", "duplicate")
    store.close()


def test_a_planned_fail_over_costs_calls_nothing_but_time(cluster):
    store = ClusterStore.from_url(cluster.url, timeout_s=20)
    old = cluster.primaries()[0]
    keys = keys_everywhere(256)
    publish(store, keys[0], "warm")

    with ThreadPoolExecutor(8) as threads:
        changing = threads.submit(cluster.fail_over, old, kill=False)
        replies = list(threads.map(lambda key: store.acquire(key, claim("a")), keys))
        changing.result()
    again = store.acquire_many([(key, claim("b")) for key in keys[1:]])

    assert {reply.outcome for reply in replies[1:]} == {"created"}
    assert {reply.outcome for reply in again} == {"duplicate"}
    store.close()


# -- URLs, permissions, and servers that are none -----------------------------------------------


@pytest.mark.parametrize("act", ["acquire", "read", "walk", "ping"])
def test_a_cluster_that_is_not_there_is_told_at_once(act):
    port = free_port()
    store = ClusterStore.from_url(f"redis+cluster://{HOST}:{port}", timeout_s=TIMEOUT_S)
    acts: dict[str, Callable[[], Any]] = {
        "acquire": lambda: store.acquire("1:00", claim("a")),
        "read": lambda: store.read("1:00"),
        "walk": lambda: list(store.walk()),
        "ping": store.ping,
    }

    unavailable_within(
        TIMEOUT_S + SLACK_S, acts[act], match=f"Redis Cluster at {HOST}:{port}, cannot"
    )


def test_a_server_without_cluster_mode_says_so(redis_server):
    store = ClusterStore.from_url(f"redis+cluster://{HOST}:{redis_server.port}")

    with pytest.raises(StoreUnavailable, match="cluster support disabled"):
        store.ping()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+cluster://host/3", "only database 0"),
        ("redis+cluster://host:port", "port"),
        ("redis+cluster://host?unknown_option=1", "unknown_option"),
        ("rediss+cluster://host?ssl_cert_reqs=perhaps", "redis://HOST"),
    ],
)
def test_a_bad_url_is_a_configuration_error(url, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(url)

    assert caught.value.setting == "unique_store_url"


def test_a_prefix_that_would_choose_the_slot_is_refused():
    with pytest.raises(ConfigurationError, match="brace"):
        ClusterStore.from_url("redis+cluster://host", key_prefix="{shop}:")


def test_what_the_store_says_of_itself():
    one = ClusterStore.from_url("redis+cluster://shop:geheim@b:7001,a:7000")
    other = ClusterStore.from_url("redis+cluster://a:7000;b:7001")

    assert repr(one) == "<ClusterStore a:7000,b:7001>"
    assert one.fingerprint() == other.fingerprint()
    assert (one.guarantee, "fail-over" in one.mechanism) == ("best-effort", True)


def test_the_documented_permissions_are_enough(redis_cluster):
    [command] = re.findall(r"(?m)^ACL SETUSER cluster-locks .*$", PAGE.read_text())
    for server in redis_cluster.servers:
        ask(server, *command.split())
    url = redis_cluster.url.replace("://", "://cluster-locks:PASSWORD@")
    bucket = fresh_key()[:4]
    keys = [bucket + fresh_key()[4:] for _ in range(2)]
    with closing(ClusterStore.from_url(url, namespace="acl", timeout_s=PATIENCE_S)) as store:
        publish(store, keys[0], "a")
        store.start(keys[0], start("a"))
        with moving(redis_cluster, slot_of(store, keys[0])):
            store.acquire(keys[1], claim("b"))
            store.finish(keys[0], finish("a", settle_later=True))
            store.settle(keys[0], finish("a"), True)
            store.flush()
        store.cancel(keys[1], "b", MINUTE)
        store.ping()

        assert {key for key, _ in store.walk()} == set(keys)
        assert len(store.servers()) == 3
