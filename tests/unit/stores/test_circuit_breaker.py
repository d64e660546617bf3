"""When the store is skipped, and for which keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.circuit_breaker import Breakers, PushRefused, StoreSkipped
from celery_unique.stores.memory import MemoryStore


class Sharded(MemoryStore):
    """The first letter of a key names its part of the store."""

    def shard_of(self, key: str) -> str:
        return key[0]


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def fail_twice(breakers: Breakers, key: str, error: StoreUnavailable) -> None:
    for _ in range(2):
        with pytest.raises(type(error)):
            breakers.of(key).run(raising(error))


def test_two_failures_of_one_shard_skip_that_one_alone():
    breakers = Breakers(Sharded())

    fail_twice(breakers, "a1", StoreUnavailable("away"))

    with pytest.raises(StoreSkipped):
        breakers.of("a2").run(lambda: "asked")
    assert breakers.of("b1").run(lambda: "asked") == "asked"
    assert breakers.failed_at > -math.inf


def test_two_failures_of_a_store_without_shards_skip_all_of_it():
    breakers = Breakers(MemoryStore())

    fail_twice(breakers, "a1", StoreUnavailable("away"))

    with pytest.raises(StoreSkipped):
        breakers.of("b1").run(lambda: "asked")


def test_a_queue_that_refuses_messages_skips_nothing():
    breakers = Breakers(MemoryStore())

    fail_twice(breakers, "a1", PushRefused("no rights"))

    breakers.of("b1").run(lambda: None)


def test_a_record_that_cannot_be_read_skips_nothing():
    breakers = Breakers(MemoryStore())

    fail_twice(breakers, "a1", UnreadableRecord("not JSON"))
    fail_twice(breakers, "a1", UnreadableRecord("not JSON"))

    assert breakers.of("a1").run(lambda: "asked") == "asked"
    assert breakers.failed_at == -math.inf
