"""One node of a cluster is gone and nothing takes its place: the others are as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.redis import ClusterStore
from celery_unique.testing.store_contract.factories import (
    QUEUE_LEASE,
    advance,
    claim,
    finish,
    fresh_key,
    publish,
    running,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S
from tests.support import RedisCluster, eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]

TIMEOUT_S = 2.0


class Broken(NamedTuple):
    store: ClusterStore
    #: Of another process, as it were: it takes no act of the first one along.
    other: ClusterStore
    dead: list[str]
    healthy: list[str]

    def some(self, n: int) -> tuple[list[str], list[str]]:
        """Keys that no other test uses: those on the dead node, and those on the others."""
        return self.dead[4 * n : 4 * n + 4], self.healthy[4 * n : 4 * n + 4]


@pytest.fixture(scope="module", params=["killed", "frozen"])
def broken(request: pytest.FixtureRequest) -> Iterator[Broken]:
    """Every key has a running task ``a``, and a follower ``f`` whose holder is due."""
    with RedisCluster() as cluster:
        lost = cluster.primaries()[0]
        with (
            closing(ClusterStore.from_url(cluster.url, timeout_s=PATIENCE_S)) as other,
            closing(ClusterStore.from_url(cluster.url, timeout_s=TIMEOUT_S)) as store,
        ):
            other.ping()
            store.ping()
            keys = [fresh_key() for _ in range(150)]
            dead = [key for key in keys if store.shard_of(key).endswith(f":{lost.port}")][:12]
            healthy = [key for key in keys if not store.shard_of(key).endswith(f":{lost.port}")]
            assert len({store.shard_of(key) for key in healthy}) == 2
            for key in (*dead, *healthy[:12]):
                publish(other, key, "a")
                other.start(key, start("a"))
                other.acquire(key, claim("f", join="message"))
            cluster.lose(lost, freeze=request.param == "frozen")
            yield Broken(store, other, dead, healthy)


def test_the_others_are_asked_and_answer_in_one_batch(broken):
    store, (dead, healthy) = broken.store, broken.some(0)
    keys = [key for pair in zip(dead, healthy, strict=True) for key in pair]

    renewed = store.renew([running(key, "a") for key in keys])
    acquired = store.acquire_many([(key, claim("b")) for key in keys])

    for key, alive, answer in zip(keys, renewed, acquired, strict=True):
        if key in healthy:
            assert alive == 2  # its own, and it has one follower
            assert not isinstance(answer, StoreUnavailable)
            assert answer.outcome == "duplicate"
        else:
            assert isinstance(alive, StoreUnavailable)
            assert isinstance(answer, StoreUnavailable)


def test_single_acts_and_one_way_acts_reach_the_others(broken):
    store, (dead, healthy) = broken.store, broken.some(1)
    fresh = broken.healthy[12]
    for key in dead:
        store.confirm(key, "a", QUEUE_LEASE)

    assert store.acquire(fresh, claim("new")).outcome == "created"
    store.confirm(fresh, "new", QUEUE_LEASE)
    for key in healthy:
        assert store.finish(key, finish("a")).verdict == "ended"

    eventually(lambda: task_of(broken.other, fresh, "new").state == "w", timeout=60)
    with pytest.raises(StoreUnavailable):
        store.read(dead[0])


def test_what_is_due_on_the_others_is_found_and_a_walk_tells_of_them_first(broken):
    store, (_, healthy) = broken.store, broken.some(2)
    advance(store, 2 * QUEUE_LEASE)

    due = store.due()

    advance(store, -2 * QUEUE_LEASE)
    assert set(healthy) <= set(due)
    assert set(broken.dead).isdisjoint(due)
    walked = []

    def walk() -> None:
        for key, _ in store.walk():
            walked.append(key)

    with pytest.raises(StoreUnavailable):
        walk()
    assert set(healthy) <= set(walked)
    assert set(broken.dead).isdisjoint(walked)
