"""What a real store tells of itself."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from celery_unique.config.app_state import state_of
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.diagnosis import Diagnosis
from tests.stores.timing import PATIENCE_S
from tests.support import RedisCluster, RedisSentinels, RedisServer, eventually
from tests.support.app import advance, make_app
from tests.support.redis_groups import ask, configured
from tests.support.server import HOST, free_port


def diagnose(url: str) -> Diagnosis:
    store = open_store(url, timeout_s=PATIENCE_S)
    try:
        told: Diagnosis = store.diagnose()  # type: ignore[attr-defined]
    finally:
        store.close()
    return told


def found(told: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in told.findings]


@pytest.mark.parametrize(
    ("fixture", "server"),
    [
        pytest.param("redis_url", r"Redis \d+\.\d+\.\d+", marks=pytest.mark.server),
        pytest.param("valkey_url", r"Valkey \d+\.\d+\.\d+", marks=pytest.mark.server),
    ],
)
def test_redis_tells_version_persistence_and_eviction(request, fixture, server):
    told = diagnose(request.getfixturevalue(fixture))

    assert told.reach == "network"
    assert re.fullmatch(server, told.facts["server"])
    assert told.facts["eviction"] == "noeviction"
    assert told.facts["persistence"] == "nothing"  # as the tests start it
    assert found(told) == [("persistence", "warning")]
    assert "parked calls and merged values are lost" in told.findings[0].message


def test_postgresql_tells_version_and_role(postgres_url):
    told = diagnose(postgres_url)

    assert told.reach == "network"
    assert told.facts["server"].startswith("PostgreSQL ")
    assert told.facts["role"] == "primary"
    assert urlsplit(postgres_url).path in told.facts["place"]


def test_sqlite_is_shared_on_one_machine(sqlite_url):
    told = diagnose(sqlite_url)

    assert told.reach == "machine"
    assert told.facts["server"].startswith("SQLite 3.")
    assert told.facts["journal"] == "wal"
    assert not told.findings


def test_memory_is_shared_in_one_process():
    assert diagnose("memory://").reach == "process"


def test_a_user_without_the_rights_gets_a_note(redis_server, redis_url):
    with redis_server.client() as client:
        client.acl_setuser(
            "few", enabled=True, passwords=["+secret"], keys=["cu:*"], commands=["+ping", "+select"]
        )
    try:
        told = diagnose(redis_url.replace("redis://", "redis://few:secret@"))
    finally:
        with redis_server.client() as client:
            client.acl_deluser("few")

    assert found(told) == [("rights", "note")]
    assert "secret" not in told.findings[0].message


def test_a_store_that_is_away_is_unavailable():
    with pytest.raises(StoreUnavailable):
        diagnose(f"redis://127.0.0.1:{free_port()}/0")


# -- several servers, and servers that change places ---------------------------------------------


@pytest.fixture(
    params=[
        pytest.param("redis_cluster", marks=pytest.mark.server),
        pytest.param("redis_sentinels", marks=pytest.mark.server),
    ]
)
def group(request: pytest.FixtureRequest) -> RedisCluster | RedisSentinels:
    found: RedisCluster | RedisSentinels = request.getfixturevalue(request.param)
    return found


def primaries_of(group: RedisCluster | RedisSentinels) -> list[RedisServer]:
    return group.primaries() if isinstance(group, RedisCluster) else [group.primary()]


def name(server: RedisServer) -> str:
    return f"{HOST}:{server.port}"


def test_every_primary_tells_of_itself_and_nothing_is_found_where_all_is_well(group):
    primaries = primaries_of(group)

    with configured(primaries, appendonly="yes"):
        told = diagnose(group.url)

    assert not told.findings
    assert set(told.servers) == {name(server) for server in primaries}
    for facts in told.servers.values():
        assert re.fullmatch(r"Redis \d+\.\d+\.\d+", facts["server"])
        assert facts["role"].startswith("primary")
        assert re.fullmatch(rf"{HOST}:\d+(, {HOST}:\d+)?", facts["replicas"])
        assert re.fullmatch(r"(\d+ days?, )?\d+:\d\d:\d\d ago", facts["started"])
        assert (facts["persistence"], facts["eviction"]) == ("append-only file", "noeviction")


def test_a_finding_names_the_server_that_it_was_made_on(group):
    primaries = primaries_of(group)
    evicting, others = primaries[-1], primaries[:-1]

    with (
        configured(primaries, appendonly="yes"),
        configured([evicting], maxmemory="500mb", maxmemory_policy="volatile-ttl"),
    ):
        told = diagnose(group.url)

    assert found(told) == [("eviction", "error")]
    assert told.findings[0].message.startswith(f"{name(evicting)}: the server may evict locks")
    assert told.servers[name(evicting)]["eviction"] == "volatile-ttl"
    assert all(told.servers[name(other)]["eviction"] == "noeviction" for other in others)


def test_what_is_the_same_on_every_node_of_a_cluster_is_said_once(redis_cluster):
    told = diagnose(redis_cluster.url)

    assert found(told) == [("persistence", "warning")]  # as the tests start them
    assert all(name(server) in told.findings[0].message for server in redis_cluster.primaries())


def test_a_user_of_a_cluster_without_the_rights_gets_a_note(redis_cluster):
    few = "ACL SETUSER few on >secret ~cu:* +cluster|slots"
    for server in redis_cluster.servers:
        ask(server, *few.split())
    try:
        told = diagnose(redis_cluster.url.replace("://", "://few:secret@"))
    finally:
        for server in redis_cluster.servers:
            ask(server, "ACL", "DELUSER", "few")

    assert found(told) == [("rights", "note")]
    assert "secret" not in told.findings[0].message
    assert set(told.servers) == {name(server) for server in redis_cluster.primaries()}


def test_a_primary_without_a_replica_is_found_and_one_that_hangs_is_named(start_server):
    cluster: RedisCluster = start_server(RedisCluster)
    alone, promoted = cluster.primaries()[0], cluster.replica_of(cluster.primaries()[1])
    cluster.fail_over(cluster.primaries()[1], kill=False)
    eventually(lambda: len(cluster.primaries()) == 3, timeout=30, message="no replica yet")
    cluster.wait_until_replicated()
    cluster.replica_of(alone).kill()
    eventually(lambda: replicas_of(alone) == 0, timeout=30, message="it is not gone")

    with configured(cluster.primaries(), appendonly="yes"):
        told = diagnose(cluster.url)

    assert found(told) == [("replicas", "warning")]
    assert told.findings[0].message.startswith(f"{name(alone)}: no replica is connected")
    assert told.servers[name(alone)]["replicas"] == "none is connected"
    assert [which for which, facts in told.servers.items() if "promoted" in facts["role"]] == [
        name(promoted)
    ]

    alone.sigstop()
    store = open_store(cluster.url, timeout_s=0.6)
    try:
        with pytest.raises(StoreUnavailable, match=f"its server {name(alone)}, did not answer"):
            store.ping()
    finally:
        alone.sigcont()
        store.close()


def replicas_of(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("replication")["connected_slaves"])


# -- identity ------------------------------------------------------------------------------------


KEPT_BY = [
    pytest.param("sqlite_url"),
    *(
        pytest.param(url, marks=pytest.mark.server)
        for url in (
            *("redis_url", "valkey_url", "cluster_url", "sentinel_url"),
            *("postgres_url", "mariadb_url"),
        )
    ),
]


@pytest.mark.parametrize("url", KEPT_BY)
def test_a_store_keeps_an_identity_that_no_walk_finds(request, url):
    app = make_app(request.getfixturevalue(url), broker="memory://")
    other = make_app(request.getfixturevalue(url), broker="memory://", unique_namespace="shop")

    identity = state_of(app).store_identity()
    try:
        assert re.fullmatch(r"[0-9a-f]{32}", identity)
        assert state_of(app).store_identity() == identity
        assert state_of(other).store_identity() == identity  # namespaces share a store
        advance(app, 3 * 86_400)
        state_of(app).store.sweep()
        assert state_of(app).store_identity() == identity
        assert list(state_of(app).store.walk()) == list(state_of(other).store.walk()) == []
    finally:
        state_of(app).store.close()
        state_of(other).store.close()


@pytest.mark.server
def test_two_addresses_of_a_server_have_one_identity_and_two_databases_have_two(redis_server):
    addresses = [redis_server.url_of(5), redis_server.url_of(5).replace("127.0.0.1", "localhost")]
    apps = [make_app(url, broker="memory://") for url in (*addresses, redis_server.url_of(6))]

    one, same, other = (state_of(app).store_identity() for app in apps)

    assert one == same != other
    assert len({state_of(app).store.fingerprint() for app in apps}) == 3
    for app in apps:
        state_of(app).store.close()


def test_processes_that_write_it_at_the_same_time_have_one(sqlite_url):
    with ThreadPoolExecutor(8) as threads:
        apps = [make_app(sqlite_url) for _ in range(8)]
        found = list(threads.map(lambda app: state_of(app).store_identity(), apps))

    assert len(set(found)) == 1


def test_locks_in_memory_are_those_of_one_object():
    one, other = (state_of(make_app("memory://")).store_identity() for _ in range(2))

    assert one != other
