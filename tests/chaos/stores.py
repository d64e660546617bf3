"""The servers of a lock store in a chaos run, and what happens to them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from celery_unique.stores import open_store
from tests.support import (
    MariaDBServer,
    PostgresServer,
    RedisCluster,
    RedisSentinels,
    RedisServer,
    ServerClock,
    SmallDisk,
    ValkeyServer,
    eventually,
)
from tests.support.redis_groups import ask, configured

#: How many slots one fault moves; the locks of a run are in at most 64.
SLOTS_MOVED = 8
#: Room for the data of a run of minutes, beside what a server begins with.
DISK_MB = 512
#: Another program's keys on the same Redis, of which memory runs out: how many, and their size.
OTHER_KEYS, OTHER_SIZE = 200, 10_000
POLICIES = ("allkeys-random", "allkeys-lru", "volatile-random", "volatile-ttl")
#: Each record with the ids of its tasks, for which other keys of its bucket and name tell nothing.
RECORDS = """
local found = {}
for _, name in ipairs(redis.call('KEYS', 'cu:{*}:*')) do
    for _, field in ipairs(redis.call('HKEYS', name)) do
        local kind = string.sub(field, 1, 2)
        if kind == 't:' or kind == 'm:' then
            found[#found + 1] = {name, string.sub(field, 3)}
        end
    end
end
return found
"""


class OneServer:
    """A store that is one server. Whatever it has acknowledged survives its death."""

    def __init__(self, server: RedisServer | PostgresServer | MariaDBServer) -> None:
        self.server = server

    @property
    def opened(self) -> AbstractContextManager[Any]:
        return self._opened()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            with self.server:
                yield
        finally:
            if self.server.clock is not None:
                self.server.clock.remove()

    @property
    def port(self) -> int | None:
        """Where a proxy can stand in front; None for several servers, whose clients learn the
        addresses from the servers themselves."""
        return self.server.port

    @property
    def url(self) -> str:
        if isinstance(self.server, MariaDBServer):
            return self.server.url_of("chaos")
        return self.server.url

    def prepare(self) -> None:
        if isinstance(self.server, MariaDBServer):
            self.server.execute("CREATE DATABASE chaos")

    def restart(self, dice: random.Random) -> str:
        """Go down and come back; returns how."""
        how = dice.choice(["SIGKILL", "SIGTERM"])
        pid = self.server.pid
        if how == "SIGKILL":
            self.server.kill()
        self.server.restart()
        if self.server.clock is not None:
            self.server.clock.forget(pid)
        return how

    def move(self, dice: random.Random) -> bool:
        """Move data between servers; False: there is nothing to move."""
        return False

    # -- disk --------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        assert self.server.disk is not None
        self.server.disk.fill()
        if isinstance(self.server, PostgresServer):
            self._end_write_ahead_segment(self.server)

    @staticmethod
    def _end_write_ahead_segment(server: PostgresServer) -> None:
        """What is in use has its place already: the next file is the first that finds none."""
        try:
            server.execute("SELECT pg_switch_wal()")
        except Exception:
            return

    def empty_disk(self) -> str:
        """Room again, and the server as its operator would have it; returns what it had done."""
        assert self.server.disk is not None
        self.server.disk.empty()
        went_down = not self.server.is_running()
        if went_down:
            self.server.restart()
        eventually(self._answers, timeout=60, interval=0.05, message="no answer after a full disk")
        return "went down" if went_down else "stayed up"

    def _answers(self) -> bool:
        store = open_store(self.url, timeout_s=2)
        try:
            for _ in store.walk():
                break
        except Exception:
            return False
        finally:
            store.close()
        return True

    # -- memory, of Redis and Valkey ------------------------------------------------------------

    @property
    def _redis(self) -> RedisServer:
        assert isinstance(self.server, RedisServer)
        return self.server

    @contextmanager
    def out_of_memory(self) -> Iterator[dict[str, Any]]:
        """Writes are refused. What is yielded tells afterwards how many were."""
        told: dict[str, Any] = {}
        before = self._refused()
        with configured([self._redis], maxmemory="1", maxmemory_policy="noeviction"):
            yield told
        told["refused"] = self._refused() - before

    def _refused(self) -> int:
        with self._redis.client() as client:
            return int(client.info("errorstats").get("errorstat_OOM", {}).get("count", 0))

    def evict(self, dice: random.Random) -> dict[str, Any]:
        """Let memory run out for other keys beside the locks; returns which records went."""
        server = self._redis
        policy = dice.choice(POLICIES)
        records: dict[str, str] = {}
        with (
            configured([server], notify_keyspace_events="Ee", maxmemory_policy=policy),
            server.client() as client,
            client.pubsub(ignore_subscribe_messages=True) as told,
        ):
            told.subscribe("__keyevent@0__:evicted")
            others = [f"other:{number}" for number in range(OTHER_KEYS)]
            with client.pipeline() as pipe:
                for name in others:
                    pipe.set(name, b"x" * OTHER_SIZE, px=dice.randrange(1_000, 20_000))
                pipe.execute()
            share = int(dice.uniform(0.3, 0.8) * OTHER_KEYS * OTHER_SIZE)
            limit = client.info("memory")["used_memory"] - share
            names: list[str] = []
            try:
                with client.pipeline(transaction=True) as pipe:
                    pipe.eval(RECORDS, 0)
                    pipe.config_set("maxmemory", limit)
                    records |= _ids(pipe.execute()[0])
                names += self._evicted(told, client, records)
            finally:
                client.config_set("maxmemory", 0)
            names += _heard(told, 0.02)
            client.delete(*others)
        locks = [name for name in names if name.startswith("cu:")]
        return {
            "mode": policy,
            "records": records,
            "evicted": sorted({each for name in locks for each in records_of(name, records)}),
            "names": locks,
            "others": len(names) - len(locks),
        }

    @staticmethod
    def _evicted(told: Any, client: Any, records: dict[str, str]) -> list[str]:
        """What goes until nothing has gone for a while. Records that are made meanwhile may go,
        too: they are read again all the time."""
        names: list[str] = []
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + 0.05:
            records |= _ids(client.eval(RECORDS, 0))
            if heard := _heard(told, 0.002):
                names += heard
                quiet_since = time.monotonic()
        return names


def _ids(found: list[list[bytes]]) -> dict[str, str]:
    """Record -> the id of one of its tasks or marks, which tells whose it is."""
    return {name.decode(): task_id.decode() for name, task_id in found}


def _heard(told: Any, wait_s: float) -> list[str]:
    names = []
    while (message := told.get_message(timeout=wait_s)) is not None:
        names.append(message["data"].decode())
    return names


def records_of(name: str, records: dict[str, str]) -> list[str]:
    """The records that a key belongs to: one, or for a due set all of its bucket."""
    bucket, _, rest = name.partition("}")
    if rest == "due":
        return [record for record in records if record.startswith(bucket + "}")]
    return [f"{bucket}}}:{rest.partition(':')[2]}"]


class Sentinels:
    """A primary with replicas: the last writes before its death may be lost."""

    port = None

    def __init__(self) -> None:
        self.servers = RedisSentinels()

    @property
    def opened(self) -> AbstractContextManager[Any]:
        return self.servers

    @property
    def url(self) -> str:
        return self.servers.url

    def prepare(self) -> None:
        self.servers.look_closely()

    def restart(self, dice: random.Random) -> str:
        old = self.servers.primary()
        old.kill()
        self.servers.wait_for_new_primary(old)
        old.restart()  # the sentinels make it a replica of the new one
        return "failed over"

    def move(self, dice: random.Random) -> bool:
        return False


class Cluster:
    """Three primaries with a replica each: the last writes before a death may be lost, and nothing
    when slots are moved."""

    port = None

    def __init__(self) -> None:
        self.servers = RedisCluster()

    @property
    def opened(self) -> AbstractContextManager[Any]:
        return self.servers

    @property
    def url(self) -> str:
        return self.servers.url

    def prepare(self) -> None:
        pass

    def restart(self, dice: random.Random) -> str:
        old = dice.choice(self.servers.primaries())
        self.servers.fail_over(old, kill=True)
        old.restart()  # comes back as a replica of the new one
        self.servers.wait_until_replicated()
        return "failed over"

    def move(self, dice: random.Random) -> bool:
        for bucket in dice.sample(range(64), SLOTS_MOVED):
            any_server = self.servers.primaries()[0]
            slot = ask(any_server, "CLUSTER", "KEYSLOT", f"cu:{{{bucket}}}:")
            source = self.servers.owner_of(slot)
            target = dice.choice([each for each in self.servers.primaries() if each is not source])
            self.servers.move_slot(slot, source, target)()
        return True


LockServers = OneServer | Sentinels | Cluster


def has_clock(kind: str) -> bool:
    """Whether its clock can be set: libfaketime does not work with the jemalloc of redis-server,
    and several servers would need a clock each."""
    return kind in ("valkey", "postgresql", "mariadb")


def has_disk(kind: str) -> bool:
    """Whether its disk can be filled."""
    return kind in ("redis", "valkey", "postgresql", "mariadb") and SmallDisk.is_possible()


def lock_servers(kind: str, *, clock: bool = False, disk: bool = False) -> LockServers:
    """With ``clock`` the server has one that can be set, and with ``disk`` one that can be filled,
    where that is possible."""
    match kind:
        case "sentinel":
            return Sentinels()
        case "cluster":
            return Cluster()
    server = _server(kind, small_files=disk)
    if clock and has_clock(kind):
        server.clock = ServerClock()
    if disk and has_disk(kind):
        server.disk = SmallDisk(DISK_MB)
    return OneServer(server)


def _server(kind: str, *, small_files: bool) -> RedisServer | PostgresServer | MariaDBServer:
    match kind:
        case "redis":
            return RedisServer(append_only=True)
        case "valkey":
            return ValkeyServer(append_only=True)
        case "postgresql":
            sizes = {"max_wal_size": "96MB", "min_wal_size": "32MB", "wal_recycle": "off"}
            return PostgresServer(settings=sizes if small_files else None)
        case "mariadb":
            return MariaDBServer()
    raise ValueError(kind)
