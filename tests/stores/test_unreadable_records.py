"""A record that cannot be read concerns its own key: every act on it is done or raises that, no
other key suffers, and an operator can delete it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    running,
    start,
)
from tests.stores.timing import PATIENCE_S
from tests.support.wrong_records import variants_for

PERSISTENT = [
    pytest.param("redis_url", marks=pytest.mark.server, id="redis"),
    pytest.param("valkey_url", marks=pytest.mark.server, id="valkey"),
    pytest.param("postgres_url", marks=pytest.mark.server, id="postgres"),
    pytest.param("mariadb_url", marks=pytest.mark.server, id="mariadb"),
    pytest.param("sqlite_url", id="sqlite"),
]


@pytest.fixture(params=PERSISTENT)
def store(request: pytest.FixtureRequest) -> Iterator[LockStore]:
    url = request.getfixturevalue(request.param)
    with closing(open_store(url, namespace=fresh_key()[:20], timeout_s=PATIENCE_S)) as opened:
        yield opened


#: Every act of the contract that is about one key.
ACTS: dict[str, Callable[[LockStore, str], Any]] = {
    "read": lambda store, key: store.read(key),
    "acquire": lambda store, key: store.acquire(key, claim("b")),
    "replace": lambda store, key: store.acquire(key, claim("c", on_conflict="replace")),
    "join": lambda store, key: store.acquire(key, claim("f", join="message")),
    "confirm": lambda store, key: store.confirm(key, "a", QUEUE_LEASE),
    "give_back": lambda store, key: store.give_back(key, "b", MINUTE),
    "help": lambda store, key: store.help(key, "b"),
    "start": lambda store, key: store.start(key, start("a")),
    "retry": lambda store, key: store.retry(key, "a", "d1", QUEUE_LEASE, False),
    "finish": lambda store, key: store.finish(key, finish("a")),
    "settle": lambda store, key: store.settle(key, finish("a"), True),
    "forget": lambda store, key: store.forget(key, "a"),
    "cancel": lambda store, key: store.cancel(key, "a", MINUTE),
    "followers": lambda store, key: store.followers(key),
    "complete_follower": lambda store, key: store.complete_follower(key, "f"),
    "reap": lambda store, key: store.reap(key, "me", RUN_LEASE),
    "promote": lambda store, key: store.promote(key, "f", "me", MINUTE, MINUTE),
    "release of one": lambda store, key: store.release(key, "a"),
}


def unreadable_in(act: Callable[[], Any]) -> UnreadableRecord | None:
    """That error, where the act raises it; any other is a failure."""
    try:
        act()
    except UnreadableRecord as error:
        return error
    return None


def test_an_act_on_such_a_record_is_done_or_says_what_is_wrong_and_no_other_key_suffers(store):
    variants = variants_for(store)
    assert len(variants) >= 20
    refused: set[str] = set()

    for variant, break_ in variants.items():
        for name, act in ACTS.items():
            bad, good, new = fresh_key(), fresh_key(), fresh_key()
            for key in (bad, good):
                publish(store, key, "a")
            store.start(good, start("a"))
            break_(store, bad, "a")

            error = unreadable_in(partial(act, store, bad))
            if error is not None:
                refused.add(variant)
                assert bad[:14] in str(error), (variant, name)
                assert bad not in str(error), (variant, name)
                assert error.key == bad, (variant, name)
                assert "unique release" in str(error), (variant, name)

            if name != "read":
                continue
            of_bad, of_good = store.renew([running(bad, "a"), running(good, "a")])
            assert of_good == 1, variant
            assert isinstance(of_bad, (int, UnreadableRecord)), variant
            _, acquired = store.acquire_many([(bad, claim("x")), (new, claim("y"))])
            assert not isinstance(acquired, StoreUnavailable), variant
            assert acquired.outcome == "created", variant
            assert {good, new} <= {key for key, _ in store.walk()}, variant
            store.due()
            store.sweep()
            store.flush()

    assert len(refused) >= 20


def test_releasing_the_key_deletes_what_cannot_be_read(store):
    walked: dict[str, str] = {}
    broken = {}
    for variant, break_ in variants_for(store).items():
        key = fresh_key()
        publish(store, key, "a")
        break_(store, key, "a")
        broken[key] = variant

    for key, record in store.walk():
        walked[key] = record.unreadable

    for key, variant in broken.items():
        error = unreadable_in(partial(store.read, key))
        if error is not None:
            assert walked[key] == str(error), variant
            assert store.release(key) == 1, variant
            assert store.read(key)[0].unreadable == "", variant
            assert store.acquire(key, claim("b")).outcome == "created", variant
