"""What the parts share: a Redis server, the contenders' apps, and numbers never used before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks import contenders
from benchmarks.contenders import OURS, Contender
from benchmarks.servers import Server, server
from benchmarks.sizes import Sizes

#: Of the floor: a name as long as that of a lock, in a database of its own.
FLOOR_DB = 60
FLOOR = "one SET NX"


@dataclass
class Stage:
    redis: Server
    sizes: Sizes
    all: dict[str, Contender]
    missing: list[str]
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def ours(self) -> Contender:
        return self.all[OURS]

    def made_anew(self) -> dict[str, Contender]:
        return {name: contenders.make(name, self.redis.url()) for name in self.all}

    def forget_messages(self) -> None:
        for one in self.all.values():
            forget_messages(one, self.redis)

    def floor(self) -> Any:
        """One bare ``SET NX`` round trip of redis-py, with the names and values of a lock."""
        client = redis.Redis.from_url(self.redis.url(FLOOR_DB))

        def set_nx(number: int) -> Any:
            name = f"cu:{{{number % 64}}}:1:{next(self.numbers):064x}"
            return client.set(name, "0f2a7c1e-53a5-4f0e-9a6e-2f4d5b6c7d8e", nx=True, px=86_400_000)

        return set_nx


def forget_messages(one: Contender, broker: Server) -> None:
    with redis.Redis.from_url(broker.url(one.database)) as client:
        client.delete(one.app.conf.task_default_queue, held_queue(one))


def held_queue(one: Contender) -> str:
    """Where messages wait that its worker is not to get yet."""
    return f"hold-{one.database}"


@contextmanager
def stage(sizes: Sizes) -> Iterator[Stage]:
    with server() as own:
        names = contenders.installed()
        made = {name: contenders.make(name, own.url()) for name in names}
        missing = [name for name in contenders.CONTENDERS if name not in made]
        yield Stage(own, sizes, made, missing)
        for one in made.values():
            one.app.close()


def store_of(contender: Contender) -> Any:
    from celery_unique.config.app_state import state_of

    return state_of(contender.app).store
