"""Redis as several servers: a cluster, and a primary with replicas that sentinels watch over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import redis

from tests.support.redis import RedisServer
from tests.support.server import HOST, free_port
from tests.support.waiting import eventually

#: A replica is there as soon as it is asked for: no waiting for more of them to share one copy,
#: nor for the first thing to replicate, before which a cluster does not count it.
REPLICATING = (
    *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
    *("--repl-ping-replica-period", "1"),
)
SLOTS = 16384


class ServerGroup:
    """Servers that start and stop together. A context manager, and what ``start_server`` takes."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []

    def start(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        raise NotImplementedError

    def _add(self, server: RedisServer) -> RedisServer:
        self.servers.append(server)
        server.start()
        return server

    def stop(self) -> None:
        for server in self.servers:
            if server.is_running():
                server.kill()  # nothing is kept, and leaving politely takes seconds
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class _Node(RedisServer):
    bus_port = 0

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.bus_port = free_port()

    def _command(self) -> list[str]:
        return [
            *super()._command(),
            *("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)),
            # Nodes tell each other of the others in a time that depends on this: see below.
            *("--cluster-node-timeout", "2000", "--cluster-allow-replica-migration", "no"),
            *("--cluster-replica-no-failover", "yes"),
            *REPLICATING,
        ]


class RedisCluster(ServerGroup):
    """Three primaries with a replica each. Nobody fails over unless ``fail_over`` says so."""

    def _start(self) -> None:
        for _ in range(6):
            self._add(_Node())
        primaries, replicas = self.servers[:3], self.servers[3:]
        for n, server in enumerate(primaries):
            first, last = n * SLOTS // 3, (n + 1) * SLOTS // 3 - 1
            ask(server, "CLUSTER", "ADDSLOTSRANGE", first, last)
        for n, server in enumerate(self.servers):
            ask(server, "CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            assert isinstance(server, _Node)
            for other in self.servers[:n]:
                ask(other, "CLUSTER", "MEET", HOST, server.port, server.bus_port)
        eventually(
            lambda: all(self._sees_all(server) for server in self.servers),
            timeout=30,
            message="the nodes of the cluster do not know each other",
        )
        for primary, replica in zip(primaries, replicas, strict=True):
            ask(replica, "CLUSTER", "REPLICATE", ask(primary, "CLUSTER", "MYID"))
        self.wait_until_replicated()
        self._wait_until_known()
        for server in self.servers:
            # Longer than any test: a busy machine must not look like a dead node.
            ask(server, "CONFIG", "SET", "cluster-node-timeout", 60_000)
            ask(server, "CONFIG", "SET", "cluster-replica-no-failover", "no")

    def _sees_all(self, server: RedisServer) -> bool:
        with server.client() as client:
            nodes = str(client.execute_command("CLUSTER NODES"))
        return nodes.count(HOST) == len(self.servers) and "handshake" not in nodes

    def _wait_until_known(self) -> None:
        def all_know() -> bool:
            return all(
                "cluster_state:ok" in raw(server, "CLUSTER INFO").decode()
                and all(len(replicas) == 1 for _, replicas in slots_of(server).values())
                for server in self.servers
            )

        eventually(all_know, timeout=30, message="not every node knows every replica")

    def wait_until_replicated(self) -> None:
        for server in self.replicas():
            wait_for_link(server)

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.servers[0].port},{HOST}:{self.servers[1].port}"

    def primaries(self) -> list[RedisServer]:
        return [server for server in self._running() if role_of(server) == "master"]

    def replicas(self) -> list[RedisServer]:
        return [server for server in self._running() if role_of(server) == "slave"]

    def _running(self) -> list[RedisServer]:
        return [server for server in self.servers if server.is_running()]

    def owner_of(self, slot: int) -> RedisServer:
        """The primary that has the slot, as the nodes see it."""
        asked = self._running()[0]
        for (first, last), (port, _) in slots_of(asked).items():
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == port)
        raise LookupError(slot)

    def replica_of(self, primary: RedisServer) -> RedisServer:
        for server in self.replicas():
            with server.client() as client:
                if client.info("replication")["master_port"] == primary.port:
                    return server
        raise LookupError(f"{primary.port} has no replica")

    def fail_over(self, primary: RedisServer, *, kill: bool) -> RedisServer:
        """Let its replica take the primary's place, dead or alive; returns the new primary."""
        replica = self.replica_of(primary)
        if kill:
            primary.kill()
            ask(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        else:
            ask(replica, "CLUSTER", "FAILOVER")
        eventually(lambda: role_of(replica) == "master", timeout=30)
        return replica

    def lose(self, primary: RedisServer, *, freeze: bool = False) -> None:
        """It dies, or hangs, and nothing takes its place: the others serve on."""
        for server in self._running():
            ask(server, "CONFIG", "SET", "cluster-require-full-coverage", "no")
            ask(server, "CONFIG", "SET", "cluster-replica-no-failover", "yes")
        if freeze:
            primary.sigstop()
        else:
            primary.kill()

    def move_slot(self, slot: int, source: RedisServer, target: RedisServer) -> Callable[[], None]:
        """Begin to move the slot, with its keys already gone; returns what ends the move."""
        source_id, target_id = (ask(each, "CLUSTER", "MYID") for each in (source, target))
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            ask(source, "MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)

        def end() -> None:
            for server in (target, source, *self.primaries()):
                ask(server, "CLUSTER", "SETSLOT", slot, "NODE", target_id)

        return end


class RedisSentinels(ServerGroup):
    """A primary, two replicas and three sentinels, two of which must agree on a fail-over.

    They take nobody for dead who is silent for less than a minute, unless ``look_closely`` says so:
    a busy machine must not look like a dead server.
    """

    NAME = "locks"

    def _start(self) -> None:
        self.first = self._add(RedisServer(extra_args=REPLICATING))
        follow = ("--replicaof", HOST, str(self.first.port))
        self.others = [self._add(RedisServer(extra_args=(*REPLICATING, *follow))) for _ in "ab"]
        for replica in self.others:
            wait_for_link(replica)
        self.sentinels = [self._add(_Sentinel(self.first.port)) for _ in "abc"]
        eventually(self._all_know_all, timeout=30, message="the sentinels do not know each other")

    def _all_know_all(self) -> bool:
        facts = [sentinel.facts(self.NAME) for sentinel in self.sentinels]
        return all(each["num-other-sentinels"] == 2 and each["num-slaves"] == 2 for each in facts)

    @property
    def url(self) -> str:
        hosts = ";".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"sentinel://{hosts}/0?sentinel_master={self.NAME}"

    def primary(self) -> RedisServer:
        """Where the sentinels say that it is."""
        port = int(self.sentinels[0].facts(self.NAME)["port"])
        return next(server for server in (self.first, *self.others) if server.port == port)

    def look_closely(self) -> None:
        """From now on a second of silence is a death: for a primary that is about to die."""
        for sentinel in self.sentinels:
            ask(sentinel, "SENTINEL", "SET", self.NAME, "down-after-milliseconds", 1000)

    def wait_for_new_primary(self, old: RedisServer) -> RedisServer:
        eventually(lambda: self.primary() is not old, timeout=60, message="nobody took its place")
        return self.primary()


class _Sentinel(RedisServer):
    def __init__(self, primary_port: int) -> None:
        super().__init__()
        self._primary_port = primary_port

    def facts(self, name: str) -> dict[str, Any]:
        with self.client() as client:
            found: dict[str, Any] = client.sentinel_master(name)
        return found

    def _prepare(self) -> None:
        name = RedisSentinels.NAME
        (self._home / "sentinel.conf").write_text(
            f"sentinel monitor {name} {HOST} {self._primary_port} 2\n"
            f"sentinel down-after-milliseconds {name} 60000\n"
            f"sentinel failover-timeout {name} 20000\n"
        )

    def _command(self) -> list[str]:
        arguments = ["--bind", HOST, "--port", str(self.port), "--sentinel"]
        return [self._program(), "sentinel.conf", *arguments]


def ask(server: RedisServer, *command: Any) -> Any:
    with server.client() as client:
        reply = client.execute_command(*command)
    return reply.decode() if isinstance(reply, bytes) else reply


@contextmanager
def configured(servers: Sequence[RedisServer], **options: str) -> Iterator[None]:
    """With these options of CONFIG SET until the end; they are written with ``_`` for ``-``."""
    wanted = {name.replace("_", "-"): value for name, value in options.items()}
    with servers[0].client() as client:
        before = {name: client.config_get(name)[name] for name in wanted}
    try:
        _configure(servers, wanted)
        yield
    finally:
        _configure(servers, before)


def _configure(servers: Sequence[RedisServer], options: Mapping[str, str]) -> None:
    for server in servers:
        for name, value in options.items():
            ask(server, "CONFIG", "SET", name, value)


def role_of(server: RedisServer) -> str:
    with server.client() as client:
        role: str = client.info("replication")["role"]
    return role


def slots_of(server: RedisServer) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """Range -> port of the primary and ports of its replicas."""
    return {
        (first, last): (nodes[0][1], [node[1] for node in nodes[1:]])
        for first, last, *nodes in raw(server, "CLUSTER SLOTS")
    }


def raw(server: RedisServer, command: str) -> Any:
    """The reply as the server gave it, whatever redis-py would make of it."""
    with redis.Redis(host=HOST, port=server.port) as client:
        client.response_callbacks.clear()
        return client.execute_command(command)


def wait_for_link(replica: RedisServer) -> None:
    def is_up() -> bool:
        with replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    eventually(is_up, timeout=30, message="a replica has no link to its primary")
