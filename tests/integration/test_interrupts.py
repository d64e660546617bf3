"""A signal may interrupt any call at any point: no later call may be swallowed for that.

A time limit (``SoftTimeLimitExceeded``) or Ctrl-C (``KeyboardInterrupt``) raises in the middle of
a public call. Here it does so at every line of this library that the call runs, or, with
``CELERY_UNIQUE_INTERRUPTS=all``, at every point where CPython runs signal handlers, in the client
libraries too; a number instead of ``all`` N takes every Nth of them. After each, the same
thread makes ordinary calls, and their messages are looked for in the broker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from celery import Celery, chain, chord, current_task, group
from celery.exceptions import Retry, SoftTimeLimitExceeded

import celery_unique
from celery_unique import apply_many, lookup, release
from celery_unique.config.app_state import state_of
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.complete import Outcome, complete
from celery_unique.header import LockHeader
from celery_unique.publish import coordinator
from tests.support import RedisServer
from tests.support.app import make_app, messages, take_messages
from tests.support.interrupts import Interruption, line_of, named, of_package

#: At points and not at lines, also in the client libraries that this one calls.
EVERYWHERE = os.environ.get("CELERY_UNIQUE_INTERRUPTS", "")
STRIDE = 1 if EVERYWHERE in ("", "all") else int(EVERYWHERE)

STORES = (
    "memory",
    pytest.param("redis", marks=pytest.mark.server),
    "sqlite",
)

Act = Callable[[int], Any]


class Shop:
    """An app with a task of each kind, and the public calls, each with a number of its own."""

    def __init__(self, app: Celery) -> None:
        self.app = app

        @app.task(name="shop.plain")
        def plain(number: int) -> None: ...

        @app.task(name="shop.rebuild", unique=True)
        def rebuild(number: int) -> None: ...

        @app.task(name="shop.newest", unique=True, unique_on_conflict="replace")
        def newest(number: int) -> None: ...

        @app.task(name="shop.rerun", unique=True, unique_on_conflict="rerun")
        def rerun(number: int) -> None: ...

        @app.task(name="shop.once", unique=True, unique_on_conflict="reject")
        def once(number: int) -> None: ...

        @app.task(name="shop.tries", unique=True, bind=True)
        def tries(self: Any, number: int) -> None: ...

        self.plain, self.rebuild, self.newest = plain, rebuild, newest
        self.rerun, self.once, self.tries = rerun, once, tries

    def acts(self) -> dict[str, Act]:
        names = [name for name in dir(type(self)) if name.startswith("act_")]
        return {name.removeprefix("act_"): getattr(self, name) for name in names}

    # -- the public calls ------------------------------------------------------

    def act_delay(self, n: int) -> None:
        self.rebuild.delay(n)

    def act_duplicate(self, n: int) -> None:
        self.rebuild.delay(n)
        self.rebuild.delay(n)

    def act_plain(self, n: int) -> None:
        self.plain.delay(n)

    def act_countdown(self, n: int) -> None:
        self.rebuild.apply_async((n,), countdown=60)

    def act_link(self, n: int) -> None:
        self.rebuild.apply_async((n,), link=self.plain.si(n))
        self.rebuild.apply_async((n,), link=self.plain.si(n))

    def act_replace(self, n: int) -> None:
        self.newest.delay(n)
        self.newest.delay(n)

    def act_rerun(self, n: int) -> None:
        self.rerun.delay(n)
        self.rerun.delay(n)

    def act_reject(self, n: int) -> None:
        self.once.delay(n)
        with suppress(celery_unique.DuplicateTask):
            self.once.delay(n)

    def act_send_task(self, n: int) -> None:
        self.app.send_task("shop.rebuild", (n,))

    def act_idempotency_key(self, n: int) -> None:
        self.plain.apply_async((n,), idempotency_key=f"order-{n}")

    def act_apply_many(self, n: int) -> None:
        calls = [self.rebuild.si(n), self.plain.si(n), self.rebuild.si(n), self.newest.si(n)]
        apply_many(calls)

    def act_group(self, n: int) -> None:
        group(self.rebuild.si(n), self.rebuild.si(n), self.plain.si(n)).apply_async()

    def act_chain(self, n: int) -> None:
        chain(self.rebuild.si(n), self.plain.si(n)).apply_async()

    def act_chord(self, n: int) -> None:
        chord([self.rebuild.si(n), self.plain.si(n)], self.rerun.si(n)).apply_async()

    def act_lookup(self, n: int) -> None:
        self.rebuild.delay(n)
        lookup(self.rebuild, (n,))

    def act_release(self, n: int) -> None:
        self.rebuild.delay(n)
        release(self.rebuild, (n,))

    def act_revoke(self, n: int) -> None:
        self.rebuild.delay(n).revoke()

    def act_retry(self, n: int) -> None:
        sent = self.tries.delay(n)
        [message] = [one for one in messages(self.app) if one.id == sent.id]
        request = {**message.headers, "args": [n], "kwargs": {}, "called_directly": False}
        self.tries.push_request(**request)
        try:
            with suppress(Retry):
                self.tries.retry(countdown=0)
        finally:
            self.tries.pop_request()

    # -- what must hold afterwards ---------------------------------------------

    def swallowed(self, n: int) -> list[str]:
        """The calls after an interruption that were answered and whose message nobody has."""
        calls = {
            "plain": lambda: self.plain.delay(n),
            "unique": lambda: self.rebuild.delay(-n - 1),
            "many": lambda: apply_many([self.once.s(-n - 1)])[0],
            # The same calls again, whose locks the interrupted one may have left.
            **{
                f"again: {task.name}": self._again(task, n)
                for task in (self.rebuild, self.newest, self.rerun, self.once, self.tries)
            },
            "again: key": lambda: self.plain.apply_async((n,), idempotency_key=f"order-{n}"),
        }
        lost = []
        for name, call in calls.items():
            try:
                result = call()
            except celery_unique.DuplicateTask as error:
                if error.state == "pending":
                    # A refused call knows that it is: its key is free within the publish grace.
                    self.pass_the_grace()
                    result = call()
                else:
                    result = self.app.AsyncResult(error.task_id)
            if result.id not in {message.id for message in messages(self.app)}:
                lost.append(name)
        return lost

    def pass_the_grace(self) -> None:
        runtime = state_of(self.app)
        runtime.store.clock_offset_ms += runtime.leases.grace_ms + 1000

    def _again(self, task: Any, n: int) -> Callable[[], Any]:
        return lambda: task.delay(n)


@pytest.fixture(params=STORES)
def shop(
    request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    # A call that meets an unconfirmed lock would wait for it about 90 ms, each time.
    monkeypatch.setattr(coordinator, "READ_AGAIN_AFTER_S", ())
    url = "memory://"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.fresh_url()
    elif request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'locks.db'}"
    app = make_app(url, result_backend="cache+memory://")
    yield Shop(app)
    state_of(app).store.close()


def watched(frame: FrameType) -> bool:
    """The library's own code; and in the long form the clients' that it calls."""
    if of_package(frame):
        return True
    if not EVERYWHERE:
        return False
    name = frame.f_code.co_filename
    if "/celery/" in name or "/kombu/" in name or "/_pytest/" in name:
        return False
    caller = frame.f_back
    while caller is not None and not of_package(caller):
        name = caller.f_code.co_filename
        if "/celery/" in name or "/kombu/" in name:
            return False  # what Celery and kombu do between a call of ours and the broker
        caller = caller.f_back
    return caller is not None


@pytest.mark.slow
@pytest.mark.timeout(3600 if EVERYWHERE else 120)
def test_no_call_is_swallowed_after_an_interruption_at_any_line_of_any_call(shop, capsys):
    done: set[Any] = set()
    number = interruptions = 0
    swallowed: list[str] = []
    interruption = Interruption(watched)
    for name, act in shop.acts().items():
        for _ in range(2):  # the first call of an app makes what later ones find
            number += 1
            points = interruption.points(lambda act=act, n=number: act(n))
            take_messages(shop.app)
        for at, point in enumerate(points):
            if at % STRIDE or (not EVERYWHERE and line_of(point) in done):
                continue
            done.add(line_of(point))
            number += 1
            error = (KeyboardInterrupt, SoftTimeLimitExceeded)[interruptions % 2]()
            interruption.interrupt(at, error, lambda act=act, n=number: act(n))
            interruptions += 1
            swallowed += [f"{name} at {named(point)}: {lost}" for lost in shop.swallowed(number)]
            take_messages(shop.app)
    with capsys.disabled():
        print(f"\n{interruptions} interruptions, {len(swallowed)} swallowed calls")
    assert interruptions > 300
    assert swallowed == []


def test_no_interrupted_completion_of_a_follower_leaves_it_the_current_task():
    """What the thread publishes later would be its children's."""
    shop = Shop(make_app("memory://", result_backend="cache+memory://"))
    interruption = Interruption()

    def complete_one(n: int) -> None:
        header = LockHeader(f"follower-{n}", "1:00")
        call = FollowerCall("shop.rebuild", [n], {}, {"link": [shop.plain.si(n)]}, header)
        complete(shop.app, call, Outcome("SUCCESS", None))

    complete_one(-2)
    points = interruption.points(lambda: complete_one(-1))
    for at, point in enumerate(points):
        interruption.interrupt(at, KeyboardInterrupt(), lambda n=at: complete_one(n))
        assert current_task._get_current_object() is None, named(point)
        assert len(shop.rebuild.request_stack) == 0, named(point)
    assert len(points) > 20


SIGNALLED = """
import random, signal, sys, time
sys.modules["hiredis"] = None  # a handler that raises can crash it, in plain Celery too
import celery_unique
from celery import Celery

app = Celery("signalled", broker="memory://", set_as_current=False)
app.conf.task_default_queue = "signalled"
app.conf.broker_pool_limit = None  # an interrupted kombu does not return what it took
celery_unique.install(app, store_url=sys.argv[1])

@app.task(name="shop.rebuild", unique=True)
def rebuild(number): ...

@app.task(name="shop.plain")
def plain(number): ...

class TimeLimit(BaseException): ...

def interrupt(*_):
    raise TimeLimit

from collections import deque
from kombu.transport import memory

class Plain:
    # A signal can leave the lock of a queue.Queue taken for ever: kombu's close() then hangs.
    def __init__(self): self.queue = deque()
    def put(self, message): self.queue.append(message)
    def qsize(self): return len(self.queue)
    def empty(self): return not self.queue

memory.Queue = Plain

def sent():
    queue = memory.Channel.queues.pop("signalled", None)
    return {message["headers"]["id"] for message in list(queue.queue)} if queue else set()

rebuild.delay(-1), plain.delay(-1), sent()
signal.signal(signal.SIGALRM, interrupt)
random.seed(7)
wanted, signals, swallowed, number = int(sys.argv[2]), 0, 0, 0
while signals < wanted:
    number += 1
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.004))
        for _ in range(50):
            calls = [rebuild.si(number), plain.si(number), rebuild.si(number)]
            celery_unique.apply_many(calls)
            rebuild.delay(number)
    except TimeLimit:
        signals += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    sent()
    results = [plain.delay(number), rebuild.delay(-number - 1)]
    swallowed += len({result.id for result in results} - sent())
print(signals, swallowed)
"""


@pytest.mark.server
@pytest.mark.slow
def test_no_call_is_swallowed_after_real_signals_at_random_moments(redis_server, capsys):
    wanted = 5000 if EVERYWHERE else 200
    argv = [sys.executable, "-c", SIGNALLED, redis_server.fresh_url(), str(wanted)]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=1800 if EVERYWHERE else 100)

    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    signals, swallowed = map(int, done.stdout.split())
    with capsys.disabled():
        print(f"\n{signals} signals, {swallowed} swallowed calls")
    assert (signals, swallowed) == (wanted, 0)
