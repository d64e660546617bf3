"""The acts are written twice, in Python and in Lua: random sequences must not tell them apart.

Both stores read the same machine's clock and are moved together. Every duration is a
multiple of ten seconds and a sequence takes far less, so that the few milliseconds between
the same act on both never decide anything; times are compared to within five seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import pytest

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores import acts as pure
from celery_unique.stores import open_store
from celery_unique.stores.acts.followers import set_due_time
from celery_unique.stores.base import (
    Acquired,
    Claim,
    Finish,
    Finished,
    Held,
    LockStore,
    Push,
    ResultWrite,
    Start,
)
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import LETTER_OF, Mark, Record, State
from tests.stores.timing import PATIENCE_S

SEQUENCES = 60
ACTS = 40
STEP_MS = 10_000
KEY = "1:5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"

#: Names and arguments that JSON and Lua's JSON write differently.
NAMES = ["shop.rebuild", "", "größe/量\"\\'", "a b\n"]
IDS = ["a", "b", "c", "d", "ä:1"]
DELIVERIES = ["", "d1", "d2", "d3"]
REAPERS = ["w1", "w1", "w2"]
STRATEGIES = ["ignore", "ignore", "reject", "replace", "replace_except_schedule", "rerun"]
FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]

Act = Callable[[Any], Any]


class Acts:
    """Draws acts; a drawn act is the same whenever it is applied."""

    def __init__(
        self, seed: int, *, lanes: bool = False, merges: int = 0, pushes: bool = False
    ) -> None:
        """``merges``: how often calls are merged. ``pushes``: the acts of a broker's own store."""
        self._random = random.Random(seed)
        self._pushes = (
            [self.publish] * 3 + [self.withdraw, self.finish_with_result] if pushes else []
        )
        self._attempts = [("a", "0")]
        self._seed = seed
        #: Histories with lanes or merges are histories of their own: the others stay as they are.
        self._lanes = [self.park, self.acquire_of_many] if lanes else []
        self._merges = merges
        # Half a step off, so that no deadline of a lost task falls on another one's.
        self._created_at = time.time_ns() // 1_000_000 + STEP_MS // 2
        self._started = ("a", "d1")

    def draw(self) -> Act:
        kinds = [self.acquire] * 4 + [self.start] * 3 + [self.finish] * 3 + [self.confirm] * 2
        kinds += [self.give_back, self.help, self.cancel, self.release, self.renew, self.retry]
        kinds += [self.forget, self.settle, self.settle, self.acquire_many, self.wait, self.wait]
        kinds += [self.join, self.join, self.complete_follower, self.reap, self.reap]
        kinds += [self.promote, self.promote, self.followers, self.follow]
        kinds += self._lanes * 6
        kinds += self._pushes * 4
        kinds += [self.merge] * self._merges + [self.unmerge] * (self._merges > 0)
        return self._random.choice(kinds)()

    def acquire(self) -> Act:
        claim = self._claim()
        return lambda store: store.acquire(KEY, claim)

    def acquire_many(self) -> Act:
        # In one millisecond: in every state, so that at most one of them is admitted.
        alone = {"states": "pswrtcdx", "on_conflict": "ignore", "parent": ""}
        claims = [(KEY, replace(self._claim(), **alone)) for _ in range(3)]
        return lambda store: store.acquire_many(claims)

    def _claim(self) -> Claim:
        pick = self._random.choice
        return Claim(
            pick(IDS),
            pick(NAMES),
            states=self._letters(list(LETTER_OF.values())),
            grace_ms=self._duration(),
            on_conflict=pick(STRATEGIES),
            parent=pick(["", "", *IDS]),
            max_wait_ms=pick([0, self._duration()]),
            window_ms=pick([0, 0, self._duration()]),
            delay_ms=pick([0, 0, self._duration()]),
            keep=self._letters(["c", "d", "x"]),
            keep_ms=pick([0, 0, self._duration()]),
            arguments=pick(["", "", "f1/ü"]),
            again=pick([False, False, True]),
            canvas=pick([False, False, True]),
        )

    def join(self) -> Act:
        claim = replace(self._claim(), states="pswrtcdx", on_conflict="ignore", parent="")
        claim = replace(claim, join=f'"{claim.task_name}"\n{claim.task_id}')
        return lambda store: store.acquire(KEY, claim)

    def park(self) -> Act:
        """Most calls of a lane have the same policy."""
        states = self._random.choice(["pswrt", "pswrt", "pswrt", "pswrtc", "psw", "r"])
        claim = replace(
            self._claim(),
            states=states,
            on_conflict="queue",
            limit=self._random.choice([1, 1, 2, 3]),
            max_queue=self._random.choice([0, 0, 0, 2]),
        )
        claim = replace(claim, join=f'"{claim.task_name}"\n{claim.task_id}')
        return lambda store: (store.acquire(KEY, claim), store.parked(KEY), store.due())

    def acquire_of_many(self) -> Act:
        claim = replace(self._claim(), limit=self._random.choice([2, 2, 3]))
        return lambda store: store.acquire(KEY, claim)

    def publish(self) -> Act:
        pick, claim = self._random.choice, replace(self._claim(), again=False, max_wait_ms=0)
        claim = replace(claim, on_conflict=pick(["ignore", "reject", "replace", "rerun"]))
        if self._random.random() < 0.5:  # the short script is enough
            claim = Claim(
                claim.task_id,
                claim.task_name,
                claim.states,
                claim.grace_ms,
                pick(["ignore", "reject"]),
                claim.parent,
            )
        elif self._random.random() < 0.3:
            claim = replace(claim, join=f'"{claim.task_name}"\n{claim.task_id}')
        attempt = (claim.task_id, str(len(self._attempts)))
        self._attempts.append(attempt)
        if self._random.random() < 0.1:
            attempt = (claim.task_id, "withdrawn before")
        lease = self._duration()
        push = Push(f"queue-{self._seed}", lease, attempt[1], f"{attempt[1]}|", "|", "|")

        def publish(store: Any) -> Any:
            [reply] = store.begin_publish([(KEY, claim, push)])()
            return "refused" if isinstance(reply, StoreUnavailable) else reply

        return publish

    def withdraw(self) -> Act:
        """Most often the last attempt; or one that has not arrived."""
        task_id, attempt = self._random.choice(
            [self._attempts[-1]] * 3 + [self._random.choice(self._attempts)]
        )
        if self._random.random() < 0.3:
            attempt = self._random.choice(["withdrawn before", "another"])
        mark = self._duration()
        return lambda store: store.withdraw(KEY, task_id, attempt, mark)

    def finish_with_result(self) -> Act:
        finish, name = self._finish(), f"result-{self._seed}"
        expires_s, unless_stored = self._random.choice([0, 600]), self._random.random() < 0.3
        write = ResultWrite(name, expires_s, f"{finish.task_id}:", ".", unless_stored)
        return lambda store: (store.finish_with_result(KEY, finish, write), stored(store, name))

    def merge(self) -> Act:
        """Half of these calls are in every living state, so that they meet."""
        pick, claim = self._random.choice, self._claim()
        states = pick(["pswrt", claim.states])
        values = f'{{"a b/":[{self._random.randint(0, 10**6)}]}}'
        join = pick(["", "", f"message of\n{claim.task_id}"])
        limits = {"merge_max_bytes": pick([30, 60, 10**6, 10**6])}
        claim = replace(claim, on_conflict="merge", merge=values, **limits)
        claim = replace(claim, states=states, join=join, arguments=pick(["", "", "", "f1/ü"]))
        return lambda store: store.acquire(KEY, claim)

    def unmerge(self) -> Act:
        call_id = self._id()
        return lambda store: store.unmerge(KEY, call_id)

    def follow(self) -> Act:
        created_at = self._random.choice(
            [0, self._created_at - STEP_MS * self._random.randint(1, 9)]
        )
        claim = replace(self._claim(), join="its\nmessage", created_at=created_at)
        holder = self._id()
        return lambda store: store.follow(KEY, claim, holder)

    def complete_follower(self) -> Act:
        task_id = self._id()
        return lambda store: store.complete_follower(KEY, task_id)

    def reap(self) -> Act:
        reaper, claim_ms = self._random.choice(REAPERS), self._duration()
        return lambda store: (store.reap(KEY, reaper, claim_ms), store.due())

    def promote(self) -> Act:
        task_id, reaper = self._id(), self._random.choice(REAPERS)
        grace, mark = self._duration(), self._duration()
        return lambda store: store.promote(KEY, task_id, reaper, grace, mark)

    def followers(self) -> Act:
        holder = self._random.choice([None, self._id()])
        return lambda store: store.followers(KEY, holder)

    def forget(self) -> Act:
        task_id = self._id()
        return lambda store: store.forget(KEY, task_id)

    def confirm(self) -> Act:
        task_id, lease = self._id(), self._duration()
        return lambda store: store.confirm(KEY, task_id, lease)

    def give_back(self) -> Act:
        task_id, mark = self._id(), self._duration()
        return lambda store: store.give_back(KEY, task_id, mark)

    def help(self) -> Act:
        task_id = self._id()
        claim_ms = self._duration()
        return lambda store: store.help(KEY, task_id, claim_ms)

    def cancel(self) -> Act:
        task_id, mark = self._id(), self._duration()
        return lambda store: store.cancel(KEY, task_id, mark)

    def release(self) -> Act:
        task_id = self._random.choice([None, self._id()])
        return lambda store: store.release(KEY, task_id)

    def start(self) -> Act:
        pick = self._random.choice
        self._created_at += 1
        self._started = (self._id(), pick(DELIVERIES[1:]))
        start = Start(
            *self._started,
            pick(NAMES),
            lease_ms=self._duration(),
            run_lease_ms=self._duration(),
            mark_ms=self._duration(),
            created_at=pick([0, self._created_at - STEP_MS * self._random.randint(1, 9)]),
            window_ms=pick([0, self._duration()]),
            keep=self._letters(["c", "d", "x"]),
            arguments=pick(["", "f2"]),
            merge=self._merges > 0,
        )
        return lambda store: store.start(KEY, start)

    def renew(self) -> Act:
        running = [self._running() for _ in range(3)]
        held = [(self._id(), "") for _ in range(3)]
        lines = [
            Held(
                *(KEY, *one, self._duration(), self._duration()),
                copies=self._random.random() < 0.3,
                waits_as=self._random.choice(["", self._running()[1]]),
                held_ms=self._random.choice([0, self._duration()]),
                returned=self._random.random() < 0.2,
                merge=self._merges > 0,
            )
            for one in running + held
        ]
        return lambda store: store.renew(lines)

    def retry(self) -> Act:
        (task_id, delivery), lease = self._running(), self._duration()
        copies = self._random.random() < 0.3
        return lambda store: store.retry(KEY, task_id, delivery, lease, copies)

    def finish(self) -> Act:
        finish = self._finish()
        return lambda store: store.finish(KEY, finish)

    def settle(self) -> Act:
        finish, mark_done = self._finish(), self._random.random() < 0.3
        return lambda store: store.settle(KEY, finish, mark_done)

    def _finish(self) -> Finish:
        pick = self._random.choice
        return Finish(
            *self._running(),
            pick(FINAL),
            retention_ms=pick([0, self._duration()]),
            mark_ms=self._duration(),
            settle_later=self._random.random() < 0.4,
            run_lease_ms=pick([0, self._duration()]),
            rejected=self._random.random() < 0.3,
            again=self._random.random() < 0.2,
            merge=self._merges > 0,
        )

    def wait(self) -> Act:
        # Rarely so long that only a payload is left of a task.
        duration = self._duration() * (2000 if self._merges and self._random.random() < 0.1 else 1)

        def move(store: LockStore) -> None:
            store.clock_offset_ms += duration

        return move

    def _running(self) -> tuple[str, str]:
        """Most often what was started last, or a sequence would seldom reach an end."""
        if self._random.random() < 0.7:
            return self._started
        return self._id(), self._random.choice(DELIVERIES)

    def _id(self) -> str:
        return self._random.choice(IDS)

    def _duration(self) -> int:
        return STEP_MS * self._random.randint(1, 6)

    def _letters(self, letters: list[str]) -> str:
        return "".join(letter for letter in letters if self._random.random() < 0.6)


class BrokerInMemory(MemoryStore):
    """What one act of a broker's own store does, put together from the pure acts."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[str] = []
        self.results: dict[str, str] = {}
        self._receipts: dict[str, int] = {}  # attempt -> when its task was created

    def begin_publish(self, pushes: Any) -> Callable[[], list[Acquired | StoreUnavailable]]:
        return lambda: [self._publish(*one) for one in pushes]

    def _publish(self, key: str, claim: Claim, push: Push) -> Acquired | StoreUnavailable:
        def act(record: Record, us: int) -> Acquired | StoreUnavailable:
            now = us // 1000
            record.purge(now)
            if record.mark_of(f"{claim.task_id}/{push.attempt}", now) is not None:
                return StoreUnavailable("withdrawn")
            acquired = pure.acquire(record, claim, now)
            if acquired.outcome == "created":
                pure.confirm(record, claim.task_id, push.lease_ms, now)
                outcome = "rerun" if acquired.after else "replaced" if acquired.replaced else ""
                self.pushed.append(f"{push.attempt}|{outcome}")
                self._receipts[push.attempt] = now
            return acquired

        return self._act(key, act)

    def withdraw(self, key: str, task_id: str, attempt: str, mark_ms: int) -> str:
        def act(record: Record, us: int) -> str:
            now = us // 1000
            record.purge(now)
            task, mark = record.tasks.get(task_id), record.mark_of(task_id, now)
            name, withdrawn = f"{task_id}/{attempt}", Mark("withdrawn", now + mark_ms)
            if attempt not in self._receipts:
                if record.mark_of(name, now) is not None:
                    return "withdrawn"
                record.put_mark(name, withdrawn, now)
                return "withdrawn" if task is None else "active"
            if task is None:
                return "withdrawn" if mark is not None and mark.kind != "done" else "active"
            depends = task.state != "w" or task.duplicates or task.since
            if depends or task.created_at != self._receipts[attempt]:
                return "active"
            record.put_mark(task_id, withdrawn, now)
            record.put_mark(name, withdrawn, now)
            del record.tasks[task_id]
            set_due_time(record, now)
            return "withdrawn"

        return self._act(key, act)

    def finish_with_result(self, key: str, finish: Finish, result: ResultWrite) -> Finished:
        before = self.results.get(result.key)
        is_own = finish.again and before is not None and before.startswith(result.head)
        if result.unless_stored and before is not None and not is_own:
            return Finished("stored")
        finished = self.finish(key, finish)
        if is_own and before is not None and finished.verdict == "ended":
            counted = int(before.removeprefix(result.head).removesuffix(result.tail))
            finished.duplicates = max(finished.duplicates, counted)
        self.results[result.key] = f"{result.head}{finished.duplicates}{result.tail}"
        return finished


def stored(store: Any, name: str) -> str | None:
    if isinstance(store, BrokerInMemory):
        return store.results.get(name)
    [value] = store._connections.exchange([("GET", name)])
    return value.decode() if value is not None else None


def pushed(store: Any, queue: str) -> list[str]:
    """The attempt and outcome of each message, oldest first."""
    if isinstance(store, BrokerInMemory):
        return store.pushed
    [messages] = store._connections.exchange([("LRANGE", queue, 0, -1)])
    parts = [message.decode().split("|") for message in reversed(messages)]
    return [f"{attempt}|{outcome}" for attempt, _, outcome, _ in parts]


def plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def about(value: Any) -> Any:
    """Equal to the same plain value with its times, in ms or us, up to five seconds away."""
    if isinstance(value, dict):
        return {
            name: pytest.approx(each, abs=5_000) if name == "wait_ms" else about(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [about(each) for each in value]
    if isinstance(value, int) and value > 10**12:
        return pytest.approx(value, abs=5_000 if value < 10**15 else 5_000_000)
    return value


@pytest.fixture(params=["redis_url", "valkey_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.mark.server
@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        *((0, {}), (1, {}), (0, {"lanes": True}), (1, {"lanes": True}), (2, {"merges": 8})),
        *((3, {"pushes": True}), (4, {"pushes": True})),
    ],
    ids=["0", "1", "0-lanes", "1-lanes", "2-merges", "3-pushes", "4-pushes"],
)
def test_every_act_leaves_the_same_record_and_reply_as_in_python(server_url, part, kinds):
    for seed in range(part * SEQUENCES, (part + 1) * SEQUENCES):
        python, lua = (
            BrokerInMemory(),
            open_store(server_url, namespace=str(seed), timeout_s=PATIENCE_S),
        )
        acts = Acts(seed, **kinds)

        for number in range(ACTS):
            act = acts.draw()
            replies = []
            for store in (python, lua):
                # Two tasks never have the same age: which one is named would be chance.
                store.clock_offset_ms += 2
                replies.append(plain(act(store)))
                store.flush()
            expected, actual = plain(python.read(KEY)[0]), plain(lua.read(KEY)[0])
            if not expected["token"]:
                # A record that lapsed takes the last token along, in Redis when it expires:
                # the clock keeps tokens growing in both.
                actual["token"] = 0
            elif "merges" in kinds and not actual["token"]:
                expected["token"] = 0  # in memory it stays with a payload

            where = f"act {number} of seed {seed}"
            assert replies[1] == about(replies[0]), where
            assert actual == about(expected), where
            assert lua.followers(KEY) == python.followers(KEY), where
            assert lua.parked(KEY) == python.parked(KEY), where
            assert pushed(lua, f"queue-{seed}") == python.pushed, where
        lua.close()
