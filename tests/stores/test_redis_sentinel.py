"""A primary that sentinels watch over: finding it, and what its fail-over costs."""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.redis import SentinelStore
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    running,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S, after_all, unavailable_within
from tests.support import RedisSentinels, RedisServer, eventually, quickest
from tests.support.redis_groups import ask
from tests.support.server import HOST, free_port

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stores-redis.md"
TIMEOUT_S = 0.6
#: What a test run on a busy machine may add to a time-out.
SLACK_S = 1.0

pytestmark = pytest.mark.server


@pytest.fixture
def sentinels(start_server: Callable[..., Any]) -> RedisSentinels:
    """Some of this test's own, that find out about a dead primary by themselves."""
    started: RedisSentinels = start_server(RedisSentinels)
    return started


# -- what a fail-over costs ---------------------------------------------------------------------


class Stream:
    """Calls on ever new keys, one after another, until it is stopped."""

    def __init__(self, store: SentinelStore) -> None:
        self._store = store
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self.created: dict[str, tuple[float, float]] = {}  # key -> when it was asked and told
        self.errors: list[Exception] = []
        self.took: list[float] = []

    def _call(self) -> None:
        while not self._over.is_set():
            key, began = fresh_key(), time.monotonic()
            try:
                assert self._store.acquire(key, claim(f"of {key}")).outcome == "created"
                self.created[key] = (began, time.monotonic())
            except Exception as error:
                self.errors.append(error)
            self.took.append(time.monotonic() - began)
            time.sleep(0.002)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)


def cut_off(primary: RedisServer, replicas: list[RedisServer]) -> None:
    """Nothing that the primary is told from now on reaches a replica."""
    with primary.client() as client:
        client.wait(len(replicas), 20_000)
    for replica in replicas:
        replica.sigstop()
    ask(primary, "CLIENT", "KILL", "TYPE", "replica")


def test_a_fail_over_loses_what_was_not_replicated_and_nothing_else(sentinels, report, caplog):
    store = SentinelStore.from_url(sentinels.url, timeout_s=2)
    old = sentinels.primary()
    kept = [fresh_key() for _ in range(200)]
    for key in kept:
        publish(store, key, f"of {key}")

    with caplog.at_level(logging.WARNING), Stream(store) as stream:
        eventually(lambda: len(stream.created) > 30, timeout=30)
        before_cut = list(stream.created)
        cut_off(old, sentinels.others)
        cut_at, number = time.monotonic(), len(stream.created)
        eventually(lambda: len(stream.created) > number + 30, timeout=30)
        sentinels.look_closely()
        old.kill()
        killed_at = time.monotonic()
        for replica in sentinels.others:
            replica.sigcont()
        new = sentinels.wait_for_new_primary(old)
        until_then = list(stream.created)
        eventually(lambda: len(stream.created) > len(until_then) + 30, timeout=60)

    told = {**dict.fromkeys(kept, (0.0, 0.0)), **stream.created}
    lost = {
        key
        for key in told
        if store.acquire(key, claim("again")).outcome == "created"  # nobody holds it any more
    }
    unreplicated = {
        key for key, (asked, at) in stream.created.items() if cut_at < asked and at < killed_at
    }
    *_, second, slowest = sorted(stream.took)
    report(
        f"fail-over of a primary behind sentinels: {len(told)} locks, {len(unreplicated)} of them "
        f"taken while no replica was connected, {len(lost)} lost; calls failed for "
        f"{len(stream.errors)} times, the slowest took {slowest:.1f} s"
    )
    assert len(unreplicated) >= 25
    assert unreplicated <= lost
    assert lost <= set(until_then) - set(before_cut)
    assert {type(error) for error in stream.errors} <= {StoreUnavailable}
    # One of them may have met a busy machine. While nobody is primary, each waits for its time-out.
    assert second < 2 + SLACK_S
    assert slowest < 2 + 10 * SLACK_S
    [noticed] = store.failovers.noticed
    assert (noticed.before, noticed.after) == (f"{HOST}:{old.port}", f"{HOST}:{new.port}")
    assert caplog.text.count("failed over from") == 1
    [facts] = store.servers()
    assert (facts.server, facts.was_promoted) == (noticed.after, True)

    # A task whose lock is lost was admitted, so it runs, and the worker is told.
    key = min(lost, key=lambda each: told[each])
    store.cancel(key, "again", MINUTE)
    assert store.start(key, start(f"of {key}")).lost
    store.close()


def test_calls_wait_for_a_fail_over_that_ends_within_the_time_out_and_it_is_told(sentinels):
    app = Celery("shop", broker="memory://", set_as_current=False)
    celery_unique.install(app, unique_store_url=sentinels.url, unique_store_timeout=30)
    heard: list[dict[str, Any]] = []

    def hear(**facts: Any) -> None:
        heard.append(facts)

    celery_unique.unique_store_error.connect(hear, weak=False)
    try:
        store: Any = state_of(app).store
        key = fresh_key()
        publish(store, key, "a")
        old = sentinels.primary()
        with old.client() as client:
            client.wait(2, 20_000)
        sentinels.look_closely()
        old.kill()

        duplicate = store.acquire(key, claim("b"))
        store.confirm(key, "a", QUEUE_LEASE)
        store.flush()
    finally:
        celery_unique.unique_store_error.disconnect(hear)

    assert duplicate.outcome == "duplicate"
    [told] = heard
    assert (told["act"], told["sender"], told["task_id"], told["key"]) == ("fail-over", "", "", "")
    assert "locks taken in the last moments" in str(told["exception"])
    assert celery_unique.manifest(app)["capabilities"]["unique_jobs"]["strength"] == "best-effort"
    store.close()


def test_a_primary_that_became_a_replica_is_left_for_the_new_one(sentinels):
    """A planned fail-over: both servers live on."""
    store = SentinelStore.from_url(sentinels.url, timeout_s=30)
    key = fresh_key()
    publish(store, key, "a")
    old = sentinels.primary()
    with old.client() as client:
        client.wait(2, 20_000)

    ask(sentinels.sentinels[0], "SENTINEL", "FAILOVER", sentinels.NAME)
    eventually(
        lambda: bool(store.acquire(key, claim("b")).holder) and bool(store.failovers.noticed),
        timeout=60,
        interval=0.1,
        ignoring=StoreUnavailable,
    )
    store.start(key, start("a"))
    store.retry(key, "a", "d1", QUEUE_LEASE, False)
    store.flush()

    assert task_of(store, key, "a").state == "t"
    store.close()


# -- sentinels that hang, lie or are gone ------------------------------------------------------


@contextmanager
def black_hole() -> Iterator[int]:
    """A port that accepts and never answers."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_sentinels_that_are_gone_or_hang_are_passed_over(redis_sentinels, key):
    living = redis_sentinels.sentinels[0].port
    with black_hole() as hanging:
        hosts = f"{HOST}:{free_port()};{HOST}:{hanging};{HOST}:{living}"
        store = SentinelStore.from_url(
            f"sentinel://{hosts}", master_name=redis_sentinels.NAME, timeout_s=8
        )

        publish(store, key, "a")

        def find_it_again() -> list[float]:
            begun = time.monotonic()
            store.close()
            store._connections._primary = None
            # The one that answered is asked first.
            assert store.acquire(key, claim("b")).outcome == "duplicate"
            return [time.monotonic() - begun]

        [took] = quickest(find_it_again, below=[1.5])

    assert took < 1.5
    store.close()


def test_no_sentinel_at_all_is_told_at_once():
    port = free_port()
    store = SentinelStore.from_url(
        f"sentinel://{HOST}:{port}", master_name="locks", timeout_s=TIMEOUT_S
    )

    said = f"locks/0 of {HOST}:{port}, cannot be reached"
    for act in (lambda: store.acquire("1:00", claim("a")), store.ping):
        unavailable_within((TIMEOUT_S + SLACK_S) / 2, act, match=said)


def test_a_name_that_no_sentinel_knows_is_told(redis_sentinels):
    url = redis_sentinels.url.replace(f"={redis_sentinels.NAME}", "=shop")

    with pytest.raises(StoreUnavailable, match="know no primary called 'shop'"):
        SentinelStore.from_url(url, timeout_s=PATIENCE_S).ping()


def test_a_sentinel_that_knows_too_few_others_is_not_believed(redis_sentinels):
    def ping(others: int) -> None:
        SentinelStore.from_url(
            redis_sentinels.url, min_other_sentinels=others, timeout_s=PATIENCE_S
        ).ping()

    ping(2)

    with pytest.raises(StoreUnavailable, match="too few others"):
        ping(3)


def test_a_server_that_is_a_replica_is_not_written_to(redis_sentinels, key):
    """A sentinel may be out of date: it is asked again until the time-out."""
    store = SentinelStore.from_url(redis_sentinels.url, timeout_s=2.0)
    replica = redis_sentinels.others[0]
    store._connections._query = lambda *_: (HOST, replica.port)  # type: ignore[method-assign]

    with pytest.raises(StoreUnavailable, match="is a slave, not the primary"):
        store.acquire(key, claim("a"))


def test_a_frozen_primary_is_given_up_within_the_time_out(sentinels, key):
    store = SentinelStore.from_url(sentinels.url, timeout_s=TIMEOUT_S)
    with closing(SentinelStore.from_url(sentinels.url, timeout_s=PATIENCE_S)) as patient:
        publish(patient, key, "a")
    after_all(store.ping)
    old = sentinels.primary()
    with old.client() as client:
        client.wait(2, 20_000)

    old.send_signal(signal.SIGSTOP)
    unavailable_within(TIMEOUT_S + SLACK_S, lambda: store.acquire(key, claim("b")), match="in time")
    sentinels.look_closely()
    outcome = eventually(
        lambda: store.acquire(key, claim("b")).outcome, timeout=60, ignoring=StoreUnavailable
    )
    old.send_signal(signal.SIGCONT)

    assert outcome == "duplicate"
    store.close()


# -- URLs and permissions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sentinel://:geheim@a:1;b:2/3?sentinel_master=main", {}),
        ("sentinel://:geheim@a:1/3;sentinel://b:2", {"master_name": "main"}),
        ("sentinel://b:2/3;sentinel://:geheim@a:1", {"master_name": "main", "sentinel_kwargs": {}}),
        ("sentinel://a:1,b:2/3", {"master_name": "main", "password": "geheim"}),
    ],
)
def test_a_url_is_read_as_kombu_does(url, options):
    store: Any = open_store(url, **options)

    assert repr(store) == "<SentinelStore main/3 of a:1,b:2>"
    connection = store._connections._servers.primary.at("host", 5).connection()
    assert (connection.password, connection.db, connection.host) == ("geheim", 3, "host")


def test_a_url_without_ports_and_with_tls(tmp_path):
    authority = tmp_path / "ca.pem"
    authority.touch()
    store: Any = open_store(
        f"sentinel://a/0?sentinel_master=main&ssl_ca_certs={authority}&sentinel_password=pw",
        sentinel_kwargs={"ssl": True, "ssl_cert_reqs": "none"},
    )

    [sentinel] = store._connections._sentinels
    asking = sentinel.address.connection()
    assert repr(store) == "<SentinelStore main/0 of a:26379>"
    assert (asking.port, asking.password, asking.cert_reqs) == (26379, "pw", 0)
    assert store._connections._servers.primary.connection().ca_certs == str(authority)


def test_a_url_that_names_no_primary_is_told_how_to():
    with pytest.raises(ConfigurationError, match=r"sentinel_master=NAME.*master_name") as caught:
        open_store("sentinel://a:1;b:2")

    assert caught.value.setting == "unique_store_url"


def test_a_brokers_sentinels_are_used_with_its_options(redis_sentinels):
    app = Celery("shop", set_as_current=False)
    hosts = [f"sentinel://{HOST}:{each.port}" for each in redis_sentinels.sentinels]
    app.conf.broker_url = ";".join(hosts)
    app.conf.broker_transport_options = {"master_name": redis_sentinels.NAME}
    celery_unique.install(app)

    store: Any = state_of(app).store
    store.ping()

    assert isinstance(store, SentinelStore)
    store.close()


def test_the_documented_permissions_are_enough(redis_sentinels, key):
    [command] = re.findall(r"(?m)^ACL SETUSER sentinel-locks .*$", PAGE.read_text())
    ask(redis_sentinels.primary(), *command.split())
    url = redis_sentinels.url.replace("://", "://sentinel-locks:PASSWORD@").replace("/0?", "/1?")

    with closing(SentinelStore.from_url(url, namespace="acl", timeout_s=PATIENCE_S)) as store:
        publish(store, key, "a")
        store.start(key, start("a"))
        store.renew([running(key, "a")])
        store.finish(key, finish("a", settle_later=True))
        store.settle(key, finish("a"), True)
        store.flush()
        store.ping()

        assert [found for found, _ in store.walk()] == [key]
        assert len(store.servers()) == 1
