"""What goes wrong during a run. Each fault is one function that does it and writes it down."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.chaos.stage import WORKERS, Stage

#: Between two faults there must be something to break: with the store gone, breakers leave it
#: alone for 5 s, and a new producer needs a second until its first call.
PAUSES_S = {"store restarted": 4.0, "producer killed": 1.0, "pool child killed": 0.2}


class Injector:
    """Runs episodes: some time under one kind of fault, each with a figure of its own."""

    def __init__(self, stage: Stage, dice: random.Random) -> None:
        self._stage = stage
        self._dice = dice
        self._lease = stage.plan.run_lease
        self._faults: dict[str, Callable[[], None]] = {
            "none": lambda: time.sleep(1.0),
            "worker killed": self._kill_worker,
            "pool child killed": self._kill_child,
            "worker shut down": self._shut_down_worker,
            "worker stopped": self._stop_worker,
            "producer killed": self._kill_producer,
            "store restarted": self._restart_store,
            "connection cut": self._cut,
        }

    @property
    def kinds(self) -> list[str]:
        return list(self._faults)

    def rounds(self, until: float, episode_s: float) -> None:
        """Every kind once in random order, then again, until the time is up."""
        while True:
            kinds = list(self._faults)
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
    def _noted(self, fault: str, **facts: Any) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
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
        how = self._dice.choice(["SIGKILL", "SIGTERM"])
        with self._noted("store restarted", mode=how):
            if how == "SIGKILL":
                self._stage.store.kill()
            self._stage.store.restart()

    def _cut(self) -> None:
        who, link = self._dice.choice(list(self._stage.proxies))
        proxy = self._stage.proxies[who, link]
        how = self._dice.choice(["cut", "stall", "stall_replies"])
        with self._noted("connection cut", target=who, link=link, mode=how):
            getattr(proxy, how)()
            time.sleep(self._dice.uniform(0.05, 1.3) * self._lease)
            proxy.restore()
