"""What goes wrong during a run. Each fault is one function that does it and writes it down."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.chaos.stage import WORKERS, Plan, Stage
from tests.chaos.stores import OneServer, has_clock, has_disk
from tests.support import TcpProxy

#: Between two faults there must be something to break: with the store gone, breakers leave it
#: alone for 5 s, and a new producer needs a second until its first call.
PAUSES_S = {
    "store restarted": 4.0,
    "disk full": 4.0,
    "out of memory": 4.0,
    "producer killed": 1.0,
    "evicted": 1.0,
    "pool child killed": 0.2,
}


def kinds_of(plan: Plan) -> list[str]:
    """The faults that are possible with this store and broker, "none" first."""
    kinds = ["none", "worker killed", "pool child killed", "worker shut down", "worker stopped"]
    kinds += ["producer killed", "store restarted", "connection cut", "partition"]
    if plan.store == "cluster":
        kinds.append("slots moved")
    if has_clock(plan.store) and plan.clock:
        kinds.append("clock jumped")
    # Not where the messages are, too: that a broker loses them shows nothing of the locks.
    if plan.broker == "one redis":
        return kinds
    if has_disk(plan.store) and plan.disk:
        kinds.append("disk full")
    if plan.store in ("redis", "valkey"):
        kinds += ["out of memory", "evicted"]
    return kinds


class Injector:
    """Runs episodes: some time under one kind of fault, each with a figure of its own."""

    def __init__(self, stage: Stage, dice: random.Random) -> None:
        self._stage = stage
        self._dice = dice
        self._lease = stage.plan.run_lease
        actions: dict[str, Callable[[], None]] = {
            "none": lambda: time.sleep(1.0),
            "worker killed": self._kill_worker,
            "pool child killed": self._kill_child,
            "worker shut down": self._shut_down_worker,
            "worker stopped": self._stop_worker,
            "producer killed": self._kill_producer,
            "store restarted": self._restart_store,
            "connection cut": self._cut,
            "partition": self._partition,
            "slots moved": self._move_slots,
            "clock jumped": self._jump_clock,
            "disk full": self._fill_disk,
            "out of memory": self._run_out_of_memory,
            "evicted": self._evict,
        }
        self._faults = {kind: actions[kind] for kind in kinds_of(stage.plan)}

    def rounds(self, until: float, episode_s: float, only: list[str] | None = None) -> None:
        """Every kind once in random order, then again, until the time is up."""
        while True:
            kinds = list(only or self._faults)
            self._dice.shuffle(kinds)
            for kind in kinds:
                self.episode(kind, episode_s)
                if time.monotonic() >= until:
                    return

    def one_round(self, episode_s: float, kinds: list[str] | None = None) -> None:
        for kind in kinds or self._faults:
            self.episode(kind, episode_s)

    def episode(self, kind: str, seconds: float) -> None:
        self._stage.journal.note("episode", fault=kind)
        ends = time.monotonic() + seconds
        # The last third is left alone: what a fault has caused belongs to its episode.
        while time.monotonic() < ends - seconds / 3:
            time.sleep(self._dice.uniform(0.1, 0.6))
            self._faults[kind]()
            time.sleep(PAUSES_S.get(kind, 0.0))
        time.sleep(max(0.0, ends - time.monotonic()))

    @contextmanager
    def _noted(
        self, fault: str, told: dict[str, Any] | None = None, **facts: Any
    ) -> Iterator[None]:
        """``told`` has what is known of the fault only when it is over."""
        began = time.monotonic()
        try:
            yield
        finally:
            facts |= told or {}
            self._stage.journal.note("fault", t=began, until=time.monotonic(), fault=fault, **facts)

    def _kill_worker(self) -> None:
        name = self._dice.choice(list(WORKERS))
        worker = self._stage.workers[name]
        pids = [worker.pid, *worker.children()]
        with self._noted("worker killed", target=name, pids=pids):
            worker.kill()  # and its pool
        # Waited for, or soon all of them would be starting and nothing would run.
        self._stage.start_worker(name).wait_for_log(r" ready\.", 60)

    def _shut_down_worker(self) -> None:
        """SIGTERM: it ends what it runs, and gives back what it holds. No excuse for anything."""
        name = self._dice.choice(list(WORKERS))
        with self._noted("worker shut down", target=name):
            self._stage.stop_worker(name)
        self._stage.start_worker(name).wait_for_log(r" ready\.", 60)

    def _kill_child(self) -> None:
        name = self._dice.choice([name for name, (pool, _) in WORKERS.items() if pool == "prefork"])
        children = self._stage.workers[name].children()
        if not children:
            return
        pid = self._dice.choice(children)
        with (
            self._noted("pool child killed", target=name, pids=[pid]),
            suppress(ProcessLookupError),
        ):
            os.kill(pid, signal.SIGKILL)

    def _stop_worker(self) -> None:
        name = self._dice.choice(list(WORKERS))
        worker = self._stage.workers[name]
        with self._noted("worker stopped", target=name):
            worker.sigstop()
            time.sleep(self._dice.uniform(1.1, 1.8) * self._lease)
            worker.sigcont()

    def _kill_producer(self) -> None:
        name = self._dice.choice(list(self._stage.producers))
        producer = self._stage.producers.pop(name)
        with self._noted("producer killed", target=name, pids=[producer.pid]):
            producer.kill()
        self._stage.start_producer()

    def _restart_store(self) -> None:
        began = time.monotonic()
        mode = self._stage.store.restart(self._dice)
        until = time.monotonic()
        self._stage.journal.note("fault", t=began, until=until, fault="store restarted", mode=mode)

    def _move_slots(self) -> None:
        """No excuse for anything: every record is somewhere all the time."""
        with self._noted("slots moved"):
            self._stage.store.move(self._dice)

    def _cut(self) -> None:
        who, link = self._dice.choice(list(self._stage.proxies))
        proxy = self._stage.proxies[who, link]
        how = self._dice.choice(["cut", "stall", "stall_replies"])
        with self._noted("connection cut", target=who, link=link, mode=how):
            getattr(proxy, how)()
            time.sleep(self._dice.uniform(0.05, 1.3) * self._lease)
            proxy.restore()

    def _partition(self) -> None:
        """Some parties are without the store and some without the broker, in one direction or in
        both, while others reach each: every link that is not cut works."""
        links = list(self._stage.proxies)
        cut = self._dice.sample(links, self._dice.randint(1, len(links) - 1))
        lasts = self._dice.uniform(0.05, 1.3) * self._lease
        with ExitStack() as noted:
            for who, link in cut:
                how = self._dice.choice(["stall", "stall_requests", "stall_replies"])
                lost = self._dice.random() < 0.5
                mode = f"{how}{', lost' if lost else ''}"
                noted.enter_context(self._noted("partition", target=who, link=link, mode=mode))
                noted.enter_context(self._parted(self._stage.proxies[who, link], how, lost=lost))
            time.sleep(lasts)

    @contextmanager
    def _parted(self, proxy: TcpProxy, how: str, *, lost: bool) -> Iterator[None]:
        getattr(proxy, how)()
        yield
        if lost:  # what was under way: the connection does not outlive it
            proxy.cut()
        proxy.restore()

    def _jump_clock(self) -> None:
        """Ahead for longer than a run lease and the grace, in one step, and back in another."""
        ahead = self._dice.uniform(1.1, 2.5) * self._lease
        clock = self._one_server.server.clock
        assert clock is not None
        with self._noted("clock jumped", ahead=ahead):
            clock.shift(ahead)
            time.sleep(self._dice.uniform(0.3, 1.3) * self._lease)
            clock.shift(0)

    def _fill_disk(self) -> None:
        told: dict[str, str] = {}
        with self._noted("disk full", told):
            self._one_server.fill_disk()
            time.sleep(self._dice.uniform(0.2, 1.3) * self._lease)
            told["mode"] = self._one_server.empty_disk()

    def _run_out_of_memory(self) -> None:
        told: dict[str, Any] = {}
        with self._noted("out of memory", told):
            with self._one_server.out_of_memory() as refused:
                time.sleep(self._dice.uniform(0.2, 1.3) * self._lease)
            told |= refused

    def _evict(self) -> None:
        told: dict[str, Any] = {}
        with self._noted("evicted", told):
            told |= self._one_server.evict(self._dice)

    @property
    def _one_server(self) -> OneServer:
        store = self._stage.store
        assert isinstance(store, OneServer)
        return store
