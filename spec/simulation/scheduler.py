"""Actors that run one at a time, virtual time, and the decisions that choose between them.

An actor is a greenlet of a simulated process. It gives up control at a *point*: where it touches
the store, the broker or the result backend, and where it sleeps. There, and only there, another
actor may run, and a fault may happen. Time moves on when no actor can run, and a little at each
point.

A decision that is not the default is recorded under the actor and the number of its point, so
that a run can be repeated from the list of its decisions, and most of them keep their meaning when
another one is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

#: What a point takes, in seconds.
STEP_S = 0.0002
#: A run that has not ended after so many points never ends.
MOST_POINTS = 40_000
#: Where every run begins.
EPOCH_S = 1_800_000_000.0

#: (actor, number of its point, what is decided) -> the choice.
Key = tuple[str, int, str]


class Killed(GreenletExit):
    """The process of this actor has died: nothing more of it happens."""


class NeverEnds(Exception):
    """More points than any run has that ends."""


@dataclass(slots=True)
class Process:
    """A simulated process: it has its own app, dies as a whole and is paused as a whole."""

    name: str
    pid: int = 0
    app: Any = None
    paused_until: float = 0.0
    is_dead: bool = False
    #: Called when it dies.
    on_death: Callable[[], None] | None = None
    #: In its place in Celery's worker state while it runs; see ``environment``.
    worker_state: Any = None
    random: Random = field(default_factory=lambda: Random(0))


class Actor:
    """One thread of a simulated process."""

    def __init__(
        self, name: str, process: Process, run: Callable[[], object], main: greenlet
    ) -> None:
        self.name = name
        self.process = process
        self.points = 0
        self.wake_at = 0.0
        self.ready_since = 0
        self.is_done = False
        self.greenlet = greenlet(run, main)

    def runs_at(self) -> float:
        return max(self.wake_at, self.process.paused_until)


class Decisions:
    """Makes each decision from a seed, or repeats those of an earlier run; records them."""

    def __init__(self, seed: int | None, given: Mapping[Key, Any] | None = None) -> None:
        self._random = None if seed is None else Random(seed)
        self._given = given or {}
        self.made: dict[Key, Any] = {}

    @property
    def is_random(self) -> bool:
        return self._random is not None

    def choose(self, key: Key, draw: Callable[[Random], Any]) -> Any:
        """What ``draw`` chooses, or was chosen before; None is the default."""
        choice = self._given.get(key) if self._random is None else draw(self._random)
        if choice is not None:
            self.made[key] = choice
        return choice


class Scheduler:
    def __init__(self, decisions: Decisions, switchiness: float) -> None:
        self.decisions = decisions
        self.now = EPOCH_S
        self.points = 0
        self.actors: list[Actor] = []
        self.names: Counter[str] = Counter()
        self.current: Actor | None = None
        self._switchiness = switchiness
        self._main = getcurrent()
        self._ready = 0
        self._dead: list[Actor] = []
        #: Called before an actor of another process runs.
        self.enter: Callable[[Process], None] = lambda process: None
        #: Called where a fault may happen; returns what the actor must do about it.
        self.fault_at: Callable[[Actor, str], Any] = lambda actor, where: None

    # -- actors ----------------------------------------------------------------------------

    def spawn(self, name: str, process: Process, run: Callable[[], object]) -> Actor:
        self.names[name] += 1
        if self.names[name] > 1:
            name = f"{name} #{self.names[name]}"
        actor = Actor(name, process, run, self._main)
        actor.wake_at = self.now
        actor.ready_since = self._next_ready()
        self.actors.append(actor)
        return actor

    def kill(self, process: Process) -> None:
        """Nothing more of the process happens. Its greenlets are unwound at the end of the run."""
        process.is_dead = True
        self._dead += [actor for actor in self.actors if actor.process is process]
        self.actors = [actor for actor in self.actors if actor.process is not process]
        if process.on_death is not None:
            process.on_death()

    def wake(self, actor: Actor) -> None:
        if actor.wake_at > self.now:
            actor.wake_at = self.now
            actor.ready_since = self._next_ready()

    def _next_ready(self) -> int:
        self._ready += 1
        return self._ready

    # -- called by actors ------------------------------------------------------------------

    def point(self, where: str) -> Any:
        """Here another actor may run. Returns the fault that happens to this one, if any."""
        actor = self.current
        if actor is None or actor.greenlet is not getcurrent() or actor.process.is_dead:
            raise Killed
        actor.points += 1
        self.points += 1
        if self.points > MOST_POINTS:
            raise NeverEnds(f"after {self.points} points")
        self.now += STEP_S
        fault = self.fault_at(actor, where)
        self._main.switch()
        if actor.process.is_dead:
            raise Killed
        return fault

    def sleep_until(self, moment: float) -> None:
        actor = self.current
        if actor is None or actor.greenlet is not getcurrent() or actor.process.is_dead:
            raise Killed
        actor.wake_at = moment
        self.point("sleep")

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self.now + max(0.0, seconds))

    # -- the run ---------------------------------------------------------------------------

    def run(self, has_ended: Callable[[], bool], until: float) -> bool:
        """Until everything has ended: True; False if it has not by then."""
        while True:
            actor = self._next()
            if actor is None:
                if has_ended():
                    return True
                moments = [a.runs_at() for a in self.actors]
                moment = min(moments, default=math.inf)
                if moment > until:
                    return False
                self.now = max(self.now, moment)
                continue
            if self.current is None or self.current.process is not actor.process:
                self.enter(actor.process)
            self.current = actor
            actor.greenlet.switch()
            if actor.greenlet.dead:
                actor.is_done = True
                if actor in self.actors:  # else its process died with it
                    self.actors.remove(actor)

    def _next(self) -> Actor | None:
        now = self.now
        ready = [a for a in self.actors if a.wake_at <= now and a.process.paused_until <= now]
        if not ready:
            return None
        last = self.current
        default = last if last in ready else min(ready, key=lambda actor: actor.ready_since)
        if len(ready) == 1:
            return default
        switchiness = self._switchiness if default is last else 0.5

        def draw(random: Random) -> str | None:
            if random.random() >= switchiness:
                return None
            return random.choice([actor.name for actor in ready if actor is not default])

        key = ("", 0, "next")
        if last is not None:
            key = (last.name, last.points, "after its end" if last.is_done else "next")
        name = self.decisions.choose(key, draw)
        return next((actor for actor in ready if actor.name == name), default)

    def close(self) -> None:
        """Unwind what is left: a greenlet that is collected would do so at any time."""
        left = [*self.actors, *self._dead]
        self.current = None
        for actor in left:
            actor.process.is_dead = True
        for actor in left:
            if actor.greenlet:  # it has begun, and has not ended
                with suppress(Exception):  # of code that handles every BaseException
                    actor.greenlet.throw(Killed)
        self.actors.clear()
        self._dead.clear()


class Event:
    """``threading.Event`` in virtual time."""

    def __init__(self, scheduler: Callable[[], Scheduler]) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Actor] = []

    def set(self) -> None:
        self._set = True
        for actor in self._waiting:
            self._scheduler().wake(actor)

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler()
        ends_at = math.inf if timeout is None else scheduler.now + timeout
        actor = scheduler.current
        assert actor is not None
        self._waiting.append(actor)
        try:
            while not self._set and scheduler.now < ends_at:
                scheduler.sleep_until(ends_at)
        finally:
            self._waiting.remove(actor)
        return self._set
