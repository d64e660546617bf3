"""Awaitable calls: what they return, in which context they run, and how long a loop waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextvars import ContextVar
from statistics import quantiles
from typing import Any

import pytest
from celery import shared_task, signals

import celery_unique
from celery_unique import DuplicateTask, StoreUnavailable, aio
from celery_unique.config.app_state import state_of
from tests.support.app import define, make_app, messages, working
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

CALLS = 1000
CALLERS = 20
#: How long the store does not reply; make test-loop: 10 s, and once more with a shorter interval
#: after which the interpreter changes threads (its own is 5 ms).
OUTAGE_S = float(os.environ.get("CELERY_UNIQUE_OUTAGE_S", "0"))
SHORT_INTERVAL_S = 0.0005


@pytest.fixture
def rebuild(app):
    return define(app, unique=True)


@pytest.fixture
def published():
    """Functions that are called where a message is about to be published."""
    functions: list[Any] = []

    def call(**_: Any) -> None:
        for function in functions:
            function()

    signals.before_task_publish.connect(call, weak=False)
    yield functions
    signals.before_task_publish.disconnect(call)


def test_every_call_is_that_of_its_function(app, rebuild):
    async def calls():
        first = await aio.delay(rebuild, 7)
        again = await aio.apply_async(rebuild, (7,), {"full": False})
        assert (first.outcome, again.outcome) == ("created", "deduplicated")
        assert again.id == first.id
        assert (await aio.lookup(rebuild, (7,))).task_id == first.id
        assert await aio.release(key=first.unique_key, app=app) is True
        assert await aio.lookup(rebuild, (7,)) is None

        many = await aio.apply_many(rebuild.s(shop) for shop in (1, 2, 1))
        assert [result.outcome for result in many] == ["created", "created", "deduplicated"]
        one = await aio.apply_async(rebuild.s(3), idempotency_key="order-3")
        assert one.outcome == "created"

    asyncio.run(calls())


def test_an_error_is_raised_to_the_awaiting_caller(rebuild):
    async def calls():
        await aio.delay(rebuild, 7)
        await aio.apply_async(rebuild, (7,), unique_on_conflict="reject")

    with pytest.raises(DuplicateTask):
        asyncio.run(calls())


@pytest.mark.parametrize(
    "statement",
    [
        "import celery_unique; celery_unique.aio.lookup",
        "from celery_unique import aio; aio.lookup",
        "import celery_unique.aio; celery_unique.aio.lookup",
        "from celery_unique.aio import lookup",
    ],
)
def test_every_way_to_import_it_works(statement):
    subprocess.run([sys.executable, "-c", statement], check=True)


# -- the caller's context --------------------------------------------------------------------


def test_context_variables_of_the_caller_are_those_of_the_call(local_app, published):
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    rebuild, seen = define(local_app, unique=True), []
    published.append(lambda: seen.append((tenant.get(), threading.current_thread().name)))

    async def call(name: str) -> None:
        tenant.set(name)
        await aio.delay(rebuild, name)

    async def calls():
        await asyncio.gather(call("a"), call("b"))

    asyncio.run(calls())

    assert sorted(name for name, _ in seen) == ["a", "b"]
    assert all(thread.startswith("celery_unique.aio") for _, thread in seen)


def test_the_current_app_of_the_caller_is_that_of_the_call():
    first, second = make_app("memory://"), make_app("memory://")

    @shared_task(name="shared.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    async def calls(app):
        app.set_current()
        result = await aio.delay(rebuild, 7)
        assert (await aio.lookup(key=result.unique_key)).task_id == result.id
        return result.id

    ids = [asyncio.run(calls(app)) for app in (first, second)]

    assert [[message.id for message in messages(app)] for app in (first, second)] == [
        [i] for i in ids
    ]


def test_a_call_from_a_body_belongs_to_the_task_of_the_body():
    app = make_app("memory://", worker_concurrency=2)
    runs: list[int] = []

    def again(n: int) -> None:
        async def call():
            return await aio.apply_async(count, (n,), unique_on=["n"])

        runs.append(n)
        if len(runs) == 1:
            assert asyncio.run(call()).outcome == "rerun"

    count: Any = define(app, "count", function=again, unique=True)
    parents: list[Any] = []

    def parent(**message: Any) -> None:
        parents.append((message["headers"]["parent_id"], message["headers"]["root_id"]))

    signals.before_task_publish.connect(parent)
    with working(app):
        first = count.delay(1)
        eventually(lambda: len(runs) == 2)

    assert parents == [(None, first.id), (first.id, first.id)]


def test_a_child_process_has_threads_of_its_own(local_app):
    rebuild = define(local_app, unique=True)
    asyncio.run(aio.delay(rebuild, 1))

    child = os.fork()
    if child == 0:
        outcome = asyncio.run(asyncio.wait_for(aio.delay(rebuild, 2), 20)).outcome
        os._exit(0 if outcome == "created" else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- a server that does not reply ------------------------------------------------------------


def test_a_call_that_waits_for_a_server_does_not_keep_others_waiting(local_app, published):
    rebuild = define(local_app, unique=True)
    blocked, go = threading.Event(), threading.Event()

    def block() -> None:
        published.clear()
        blocked.set()
        go.wait(20)

    published.append(block)

    async def calls():
        first = asyncio.create_task(aio.delay(rebuild, 1))
        await asyncio.to_thread(blocked.wait, 20)
        second = await aio.delay(rebuild, 2)
        assert not first.done()
        go.set()
        return (await first).outcome, second.outcome

    assert asyncio.run(calls()) == ("created", "created")


@pytest.mark.parametrize(("fails", "level"), [(False, "INFO"), (True, "WARNING")])
def test_a_call_whose_caller_was_cancelled_is_reported(local_app, caplog, fails, level):
    blocked, go = threading.Event(), threading.Event()

    def key(**_: Any) -> Any:
        blocked.set()
        go.wait(20)
        return None if fails else "key"

    rebuild = define(local_app, unique=True, unique_key=key)

    async def calls():
        call = asyncio.create_task(aio.delay(rebuild, 1))
        await asyncio.to_thread(blocked.wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with caplog.at_level(logging.INFO, logger="celery_unique"):
        asyncio.run(calls())
        go.set()
        eventually(lambda: any("its caller was cancelled" in text for text in caplog.messages))

    reports = [r for r in caplog.records if "its caller was cancelled" in r.message]
    assert [record.levelname for record in reports] == [level]
    assert len(messages(local_app)) == (0 if fails else 1)


# -- the loop --------------------------------------------------------------------------------


class Heartbeat:
    """A task of the loop that wakes every millisecond: how late it was at most, and how much
    processor time the thread of the loop used between two beats, which a busy machine leaves as
    it is.

    Of the callbacks, during which no other can run: the processor time that each used, the most
    time of the garbage collector in one, which the other two times are without, and how long each
    took by the clock.
    """

    def __init__(self) -> None:
        self.late_ms = self.busy_ms = self.collector_ms = 0.0
        self.own_ms: list[float] = []
        self.took_ms: list[float] = []
        self._collected_s = 0.0

    @property
    def callback_ms(self) -> float:
        """Of a thousand callbacks 999 used no more. A virtual machine counts time in which it did
        not run, and interrupts, so that the longest one of many is that of the machine."""
        return quantiles(self.own_ms, n=1000, method="inclusive")[-1]

    @property
    def usual_ms(self) -> float:
        """Of twenty callbacks 19 took no longer by the clock: a busy machine interrupts some."""
        return quantiles(self.took_ms, n=20, method="inclusive")[-1]

    def _own_s(self) -> float:
        return time.thread_time() - self._collected_s

    async def __aenter__(self) -> Heartbeat:
        self._run, thread = asyncio.Handle._run, threading.get_ident()

        def run(handle: asyncio.Handle) -> None:
            collected, own, at = self._collected_s, self._own_s(), time.perf_counter()
            self._run(handle)
            if threading.get_ident() == thread:
                self.own_ms.append((self._own_s() - own) * 1000)
                self.took_ms.append((time.perf_counter() - at) * 1000)
                collected = self._collected_s - collected
                self.collector_ms = max(self.collector_ms, collected * 1000)

        def collect(phase: str, _: Any) -> None:
            nonlocal began
            if threading.get_ident() == thread:
                if phase == "stop":
                    self._collected_s += time.thread_time() - began
                began = time.thread_time()

        began, self._collect = 0.0, collect
        gc.callbacks.append(collect)
        asyncio.Handle._run = run  # type: ignore[method-assign]
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.01)  # the beat that is late counts, too
        self._task.cancel()
        gc.callbacks.remove(self._collect)
        asyncio.Handle._run = self._run  # type: ignore[method-assign]

    async def _beat(self) -> None:
        await asyncio.sleep(0)
        while True:
            began, own = time.perf_counter(), self._own_s()
            await asyncio.sleep(0.001)
            self.late_ms = max(self.late_ms, (time.perf_counter() - began) * 1000 - 1)
            self.busy_ms = max(self.busy_ms, (self._own_s() - own) * 1000)


async def longest_stall(call: Any, for_s: float = 0.0) -> tuple[Heartbeat, Counter[str]]:
    """Of 1,000 calls of 20 callers, or more where they are to take some time."""
    numbers, until = itertools.count(), time.monotonic() + for_s
    outcomes: Counter[str] = Counter()

    async def caller() -> None:
        while (number := next(numbers)) < CALLS or time.monotonic() < until:
            try:
                outcomes[await call(number)] += 1
            except StoreUnavailable:
                outcomes["unavailable"] += 1

    async with Heartbeat() as heart:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return heart, outcomes


def test_a_call_without_a_store_leaves_no_cycle_of_its_error():
    """Collecting the tracebacks of an outage in the thread of the loop stopped it for 10 ms."""
    app = make_app("redis://127.0.0.1:1/0", unique_store_timeout=0.1)
    rebuild = define(app, unique=True)

    async def calls(number: int) -> None:
        for shop in range(number):
            with contextlib.suppress(StoreUnavailable):
                await aio.delay(rebuild, shop)

    asyncio.run(calls(2))  # what is made once
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(calls(20))
        gc.collect()
        errors = [each for each in gc.garbage if isinstance(each, StoreUnavailable)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert errors == []


def test_calls_do_not_run_ahead_of_a_loop_that_has_not_resumed_their_callers(
    local_app, published, monkeypatch
):
    """Otherwise all that end while the loop waits for its turn are resumed in one of its rounds."""
    monkeypatch.setattr(aio, "RESUMES_WITHIN_S", 20)
    rebuild = define(local_app, unique=True)
    first, second = threading.Event(), threading.Event()

    def publishing() -> None:
        (second if first.is_set() else first).set()

    published.append(publishing)

    async def calls() -> list[Any]:
        waiting = [asyncio.create_task(aio.delay(rebuild, shop)) for shop in range(5)]
        await asyncio.sleep(0)
        assert first.wait(20)  # the loop is busy here
        assert not second.wait(0.2)
        return await asyncio.gather(*waiting)

    assert [result.outcome for result in asyncio.run(calls())] == ["created"] * 5


@pytest.mark.slow
def test_a_loop_goes_on_during_calls_and_an_outage(start_server, start_proxy, report, caplog):
    caplog.set_level(logging.CRITICAL, logger="celery_unique")  # not a thousand lines
    server = start_server(RedisServer)
    proxy = start_proxy(server.port)
    # Celery itself waits without a limit for a broker that does not reply.
    app = make_app(proxy.url_of(server.url), broker=server.url, unique_store_timeout=1.0)
    rebuild = define(app, unique=True)

    async def no_call(_: int) -> str:
        return await asyncio.to_thread(str, "created")

    async def direct(number: int) -> str:
        return str(rebuild.delay(f"direct {number}").outcome)

    async def in_thread(number: int) -> str:
        return (await asyncio.to_thread(rebuild.delay, f"to_thread {number} {time.time()}")).outcome

    async def awaitable(number: int) -> str:
        return (await aio.delay(rebuild, f"aio {number} {time.time()}")).outcome

    ways = {
        "asyncio.to_thread, no call": no_call,
        "task.delay": direct,
        "asyncio.to_thread": in_thread,
        "aio.delay": awaitable,
    }

    async def measure(suffix: str = "") -> dict[str, Heartbeat]:
        async with Heartbeat() as idle:
            await asyncio.sleep(max(0.5, OUTAGE_S))  # the rarest beats of a machine count, too
        hearts = {f"no calls{suffix}": idle}
        for name, call in ways.items():
            hearts[name + suffix], outcomes = await longest_stall(call)
            assert outcomes == {"created": CALLS}
        proxy.stall()
        for name in ("asyncio.to_thread", "aio.delay") if OUTAGE_S else ("aio.delay",):
            told = f"{name}, store outage{suffix}"
            hearts[told], outcomes = await longest_stall(ways[name], OUTAGE_S)
            assert outcomes.keys() == {"unavailable"}
        proxy.restore()
        return hearts

    # The objects of a whole test run would take the collector longer than any call.
    gc.collect()
    gc.freeze()
    interval = sys.getswitchinterval()
    try:
        asyncio.run(longest_stall(awaitable))  # connects, imports and defines
        hearts = asyncio.run(measure())
        if OUTAGE_S:
            sys.setswitchinterval(SHORT_INTERVAL_S)
            del ways["task.delay"]
            eventually(lambda: rebuild.delay("back").outcome, ignoring=StoreUnavailable)
            hearts |= asyncio.run(measure(f", interval {SHORT_INTERVAL_S * 1000:g} ms"))
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
    state_of(app).store.close()

    report(f"longest stall of the event loop during {CALLS} calls of {CALLERS} callers:")
    for name, heart in hearts.items():
        report(
            f"  {name:45} {heart.late_ms:8.1f} ms late, {heart.busy_ms:6.2f} ms of its own time; "
            f"callbacks: longest {max(heart.own_ms):6.2f}, 99.9% {heart.callback_ms:5.2f} ms, "
            f"collector {heart.collector_ms:5.2f} ms, 95% by the clock {heart.usual_ms:5.2f} ms"
        )
    ours = [heart for name, heart in hearts.items() if name.startswith("aio")]
    direct_calls = hearts["task.delay"]
    assert direct_calls.late_ms > 50  # what is measured here
    assert max(direct_calls.own_ms) > 10
    # The share of the library, whatever else the machine does: a callback takes a fraction of what
    # a call takes in the loop, and the longest one not much more than that.
    call_ms = sum(direct_calls.own_ms) / CALLS
    call_took_ms = sum(direct_calls.took_ms) / CALLS
    longest_ms = 1.0 if OUTAGE_S else max(1.0, 3 * call_ms)
    assert all(heart.callback_ms < longest_ms for heart in ours)
    assert all(heart.usual_ms < call_took_ms / 2 for heart in ours)
    assert all(max(heart.own_ms) < 10 for heart in ours)
    assert all(heart.busy_ms < 10 for heart in ours)
    # A busy machine lets the loop wait, too, but never for as long as a call waits for the store.
    assert all(heart.late_ms < 900 for heart in ours)


def test_it_is_public():
    assert celery_unique.aio is aio
    assert set(aio.__all__) == {"apply_async", "delay", "lookup", "release", "apply_many"}
