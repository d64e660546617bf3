"""The doctor on a cluster and behind sentinels: every primary is looked at, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_unique import lookup
from celery_unique.testing.store_contract.factories import GRACE, MINUTE, claim, fresh_key
from tests.support import RedisCluster, RedisSentinels, RedisServer, eventually
from tests.support.redis_groups import configured
from tests.support.server import HOST
from tests.workers.operating.desk import ANSWERS_WITHIN_S, Desk, Done

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(400)]

Group = RedisCluster | RedisSentinels


@pytest.fixture(params=["cluster", "sentinel"])
def group(request: pytest.FixtureRequest) -> Group:
    name = {"cluster": "redis_cluster", "sentinel": "redis_sentinels"}[request.param]
    found: Group = request.getfixturevalue(name)
    return found


@pytest.fixture
def desk_of(redis_server: RedisServer, directory: Path) -> Iterator[Callable[..., Desk]]:
    """A desk with locks in these servers, in a namespace of its own, and a broker beside them."""
    desks: list[Desk] = []

    def make(group: Group, **conf: Any) -> Desk:
        conf["unique_namespace"] = fresh_key()
        desks.append(Desk(redis_server.fresh_url(), group.url, directory, conf))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


def examine(desk: Desk) -> Done:
    return desk.examine()


def troubles(done: Done) -> list[tuple[str, str]]:
    findings = done.json()["findings"]
    return [(one["check"], one["message"]) for one in findings if one["level"] != "note"]


def primaries_of(group: Group) -> list[RedisServer]:
    return group.primaries() if isinstance(group, RedisCluster) else [group.primary()]


def name(server: RedisServer) -> str:
    return f"{HOST}:{server.port}"


def test_nothing_is_found_where_all_is_well_and_trouble_on_one_server_is(group, desk_of):
    desk = desk_of(group)
    desk.start_worker("several")
    call: Any = {"kwargs": {"shop_id": 2}, "unique": True, "countdown": 600}
    desk.app.send_task("shop.rebuild_index", **call)
    follower = desk.app.send_task("shop.rebuild_index", task_id=fresh_key(), **call)
    primaries = primaries_of(group)

    with configured(primaries, appendonly="yes"):
        for _ in range(3):  # a worker on a busy machine may be too late
            well = desk.unique("doctor", "--timeout", ANSWERS_WITHIN_S)
            if "workers replied" in well.out:
                break
        with configured(primaries[-1:], maxmemory="500mb", maxmemory_policy="allkeys-lru"):
            done = examine(desk)

    assert follower.outcome == "joined"
    assert well.code == 0, well.out
    assert well.lines[-1] == "Nothing is wrong."
    assert "1 call follows another one, and workers monitor it" in well.out
    assert "set up for locks" in well.out
    for server in primaries:
        assert name(server) in well.lines
    assert done.code == 1
    [(check, message)] = troubles(done)
    assert check == "eviction"
    assert message.startswith(f"{name(primaries[-1])}: the server may evict locks")
    told = done.json()
    assert set(told["servers"]) == {name(server) for server in primaries}
    assert told["servers"][name(primaries[-1])]["eviction"] == "allkeys-lru"
    assert told["followers"] == {"calls": 1, "overdue": 0}
    assert told["failovers"] == []


def test_followers_that_no_worker_looks_after_are_found(group, desk_of):
    desk, key = desk_of(group), fresh_key()
    desk.store.clock_offset_ms = -(GRACE + 10 * MINUTE)  # it was then that they came
    desk.store.acquire(key, claim("died before it was published"))
    assert desk.store.acquire(key, claim("follower", join="its message")).outcome == "joined"

    with configured(primaries_of(group), appendonly="yes"):
        done = examine(desk)

    assert done.code == 0
    (first, _), (second, message) = troubles(done)
    assert (first, second) == ("workers", "followers")
    assert "1 of 1 calls" in message
    assert "they follow died before it was published" in message
    [finding] = [one for one in done.json()["findings"] if one["check"] == "followers"]
    assert "start a worker of this app" in finding["cure"]
    assert done.json()["followers"] == {"calls": 1, "overdue": 1}


def test_a_fail_over_that_a_worker_has_noticed_is_told(start_server, desk_of):
    cluster: RedisCluster = start_server(RedisCluster)
    desk = desk_of(cluster, unique_run_lease=3)
    worker = desk.start_worker("noticing")
    # So it has seen the servers as they were. About every second it looks for followers.
    call = desk.app.send_task("shop.rebuild_index", kwargs={"shop_id": 2}, unique=True)
    eventually(lambda: has_ended(desk, call), timeout=30, message="the worker runs nothing")
    old = cluster.primaries()[0]

    with configured(cluster.servers, appendonly="yes"):
        new = cluster.fail_over(old, kill=False)
        worker.wait_for_log("lock store failed over", 30)
        eventually(lambda: len(cluster.primaries()) == 3, timeout=30, message="no replica yet")
        cluster.wait_until_replicated()
        done = examine(desk)

    assert done.code == 0, done.out
    told = done.json()
    [failover] = told["failovers"]
    assert (failover["before"], failover["after"]) == (name(old), name(new))
    assert failover["noticed_by"] == [worker.hostname]
    [finding] = [one for one in told["findings"] if one["check"] == "fail-over"]
    assert finding["level"] == "note"
    assert f"failed over from {name(old)} to {name(new)}" in finding["message"]
    assert told["servers"][name(new)]["role"] == "primary, promoted since it was started"


def has_ended(desk: Desk, call: Any) -> bool:
    return lookup(key=call.unique_key, app=desk.app) is None
