"""The lock store is away or silent: calls and workers go on, and say so.

The store is a Redis of its own, so that broker and results live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.header import LockHeader
from celery_unique.reporting import unique_store_error
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import RedisServer, TcpProxy, eventually
from tests.support.stage import Stage, forget_results, staged_app
from tests.workers.faults.caller import Caller

RUN_LEASE_S = 2.0
STORE_TIMEOUT_S = 0.5
GATE_TIMEOUT_S = 0.25
LONG_STORE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def store_server() -> Iterator[RedisServer]:
    with RedisServer(append_only=True) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(store_server: RedisServer) -> Iterator[TcpProxy]:
    """The worker's way to the store."""
    with TcpProxy(store_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shared_stage(make_stage: Callable[..., Stage], store_server: RedisServer) -> Stage:
    """The test has a way of its own to the store."""
    return make_stage(
        unique_store_url=store_server.fresh_url(),
        unique_run_lease=RUN_LEASE_S,
        unique_store_timeout=STORE_TIMEOUT_S,
        unique_gate_timeout=GATE_TIMEOUT_S,
        breaker_s=1,
    )


@pytest.fixture
def stage(shared_stage: Stage, proxy: TcpProxy) -> Iterator[Stage]:
    shared_stage.ensure_worker(
        settings={"unique_store_url": proxy.url_of(shared_stage.settings["unique_store_url"])}
    )
    yield shared_stage
    proxy.restore()


def away(proxy: TcpProxy, how: str) -> None:
    {"cut": proxy.cut, "stall": proxy.stall}[how]()


# -- the worker ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_worker_runs_what_was_admitted_and_gives_it_back_when_the_store_returns(
    stage, proxy, tag, how
):
    tags = [f"{tag}-{n}" for n in range(8)]
    stage.end_of(stage.call("quick", f"{tag}-warm"), "SUCCESS")
    wait_for_breaker(stage)

    away(proxy, how)
    began = time.monotonic()
    results = [stage.call("quick", each) for each in tags]
    for result in results:
        stage.end_of(result, "SUCCESS")
    took_s = time.monotonic() - began

    # Two time-outs at the gate and two at the end, then the store is left alone.
    print(f"{len(tags)} tasks in {took_s:.2f} s with the store away ({how})")
    # It takes a busy machine some time, too; asking for each of them would take this long.
    assert took_s < len(tags) * (GATE_TIMEOUT_S + STORE_TIMEOUT_S)
    for result in results:
        acts = {fact["act"] for fact in stage.signals(result.id, "unique_store_error")}
        assert acts == {"start", "finish"}
    assert all(stage.lock("quick", each) is not None for each in tags)

    proxy.restore()
    for each, result in zip(tags, results, strict=True):
        stage.wait_until_free("quick", each, timeout=15)
        stage.wait_for_signal(result.id, "unique_released")
        assert len(stage.begins(each)) == 1


def wait_for_breaker(stage: Stage) -> None:
    """Until the worker asks the store again: an earlier test may have kept it from that."""

    def asked() -> bool:
        result = stage.app.tasks["quick"].delay(f"breaker-{time.monotonic()}")
        stage.end_of(result, "SUCCESS")
        return stage.signals(result.id, "unique_store_error") == []

    eventually(asked, timeout=15, interval=0.3)


def test_gate_waits_a_quarter_of_a_second_and_then_not_at_all(stage, proxy, tag):
    url = proxy.url_of(stage.settings["unique_store_url"])
    waiting_long = {"unique_store_url": url, "unique_store_timeout": LONG_STORE_TIMEOUT_S}
    app = staged_app(**{**stage.settings, **waiting_long})
    holding = state_of(app).part(WorkerLockClient)
    header = LockHeader(tag, stage.key("quick", tag), delivery="worker/1/boot/1")
    holding.is_run_by_its_sender(header)  # connects
    proxy.stall()

    times, said = [], []
    for _ in range(6):
        began = time.monotonic()
        with pytest.raises(celery_unique.StoreUnavailable) as caught:
            holding.start(header, "quick", acks_late=False)
        times.append(time.monotonic() - began)
        said.append(str(caught.value))

    print("gate calls took", [f"{each * 1000:.0f} ms" for each in times])
    # Not the time-out of calls; not even a time-out. A busy machine may hold up one of each.
    *others, _ = sorted(times[2:])
    assert min(times[:2]) < LONG_STORE_TIMEOUT_S / 2
    assert max(others) < GATE_TIMEOUT_S
    assert all("0.25 s" in each and "unique_gate_timeout" in each for each in said[:2])


def test_worker_starts_and_works_without_the_store(shared_stage, proxy, tag):
    stage = shared_stage
    url = proxy.url_of(stage.settings["unique_store_url"])
    proxy.cut()
    worker = stage.start_worker(settings={"unique_store_url": url}, queues=["without"])

    result = stage.call("quick", tag, queue="without")
    stage.end_of(result, "SUCCESS")
    proxy.restore()

    stage.wait_until_free("quick", tag, timeout=15)
    worker.kill()
    stage.workers.remove(worker)


@pytest.mark.parametrize("task", ["hold", "hold_late"])
def test_lock_whose_release_failed_is_released_when_the_store_is_up_again(
    stage, store_server, tag, task
):
    wait_for_breaker(stage)
    result = stage.call(task, tag)
    stage.wait_for_begin(tag)

    store_server.kill()
    stage.props.let_go(tag)
    stage.end_of(result, "SUCCESS")
    stage.wait_for_signal(result.id, "unique_store_error")
    store_server.restart()  # with everything that was in it

    stage.wait_until_free(task, tag, timeout=15)
    stage.wait_for_signal(result.id, "unique_released")
    assert stage.worker.is_running()
    assert stage.signals(result.id, "unique_lost") == []
    # The process that ran it, and the worker that acknowledged it, report that independently.
    eventually(lambda: not stage.record(task, tag))


def test_key_stays_taken_where_worker_and_store_are_both_gone_at_the_end(stage, proxy, tag):
    """Acknowledged late, so the key waits for a message that will not come: an operator's case."""
    wait_for_breaker(stage)
    result = stage.call("hold_late", tag)
    stage.wait_for_begin(tag)

    proxy.cut()
    stage.props.let_go(tag)
    stage.end_of(result, "SUCCESS")
    stage.worker.kill()
    proxy.restore()

    assert stage.duplicate("hold_late", tag).id == result.id
    assert celery_unique.release("hold_late", (tag,), app=stage.app)
    assert stage.call("hold_late", tag, queue="nobody").id != result.id


def test_task_that_started_without_the_store_is_like_any_other_when_it_returns(stage, proxy, tag):
    wait_for_breaker(stage)
    proxy.cut()
    result = stage.call("hold", tag)
    stage.wait_for_begin(tag)
    assert stage.lock("hold", tag).state == "available"
    proxy.restore()

    lock = stage.wait_for_state("hold", tag, state="active")
    assert (lock.task_id, lock.worker) == (result.id, stage.worker.hostname)
    assert stage.signals(result.id, "unique_lost") == []

    # So its key is not stuck when the worker dies.
    stage.worker.kill()
    killed_at = time.time()
    with Caller(stage, "hold", tag) as caller:
        admitted = caller.wait_for_admission()
    print(f"free {admitted.at - killed_at:.2f} s after SIGKILL")
    stage.props.let_go(tag)


def test_key_stays_taken_where_a_task_started_without_the_store_and_its_worker_died(
    stage, proxy, tag
):
    """The store never heard of the start: its record is that of a message in the queue."""
    wait_for_breaker(stage)
    proxy.cut()
    result = stage.call("hold", tag)
    stage.wait_for_begin(tag)
    stage.worker.kill()
    proxy.restore()

    assert stage.entry("hold", tag).held_until == 0
    assert stage.duplicate("hold", tag).id == result.id
    assert celery_unique.release("hold", (tag,), app=stage.app)
    assert stage.call("hold", tag, queue="nobody").id != result.id


def test_key_of_such_a_task_is_served_again_where_the_store_knew_who_had_its_message(
    stage, proxy, tag
):
    wait_for_breaker(stage)
    stage.call("hold", f"first-{tag}")
    stage.wait_for_begin(f"first-{tag}")
    result = stage.call("hold", tag)
    eventually(lambda: stage.entry("hold", tag).held_until, message="it is not held")
    proxy.cut()
    stage.props.let_go(f"first-{tag}")
    stage.wait_for_begin(tag)
    stage.worker.kill()
    proxy.restore()
    stage.start_worker(
        settings={"unique_store_url": proxy.url_of(stage.settings["unique_store_url"])}
    )

    def runs_again() -> bool:
        return len(stage.begins(tag)) == 2 or stage.duplicate("hold", tag).id != result.id

    eventually(runs_again, timeout=60)

    assert [run["id"] for run in stage.begins(tag)] == [result.id, result.id]
    stage.props.let_go(tag)
    stage.end_of(result, "SUCCESS")


def test_retry_that_could_not_be_told_is_told_later(stage, proxy, tag):
    """Its countdown is longer than the run lease, which would end its lock."""
    wait_for_breaker(stage)
    countdown = RUN_LEASE_S + 3
    result = stage.call("retry_when_told", tag, countdown)
    stage.wait_for_begin(tag)

    proxy.cut()
    stage.props.let_go(tag)
    stage.wait_for_signal(result.id, "unique_store_error")
    proxy.restore()

    stage.wait_for_state("retry_when_told", tag, countdown, state="retryable")
    # For longer than the run lease, and not until the retry: it ends at once, and its key is free.
    with Caller(stage, "retry_when_told", tag, countdown) as caller:
        eventually(lambda: caller.lasted_s() > RUN_LEASE_S + 0.2)
    again = stage.wait_for_begin(tag, 2)
    stage.end_of(result, "SUCCESS")
    # A busy machine may have gone on to call until then.
    while_it_waited = [answer for answer in caller.answers if answer.at < again["at"]]
    assert {answer.task_id for answer in while_it_waited} == {result.id}
    if caller.admitted:
        stage.wait_for_begin(tag, 3)
        stage.worker.kill()  # the body waits for a word, and later tests for the worker
    assert stage.signals(result.id, "unique_lost") == []


def test_task_whose_worker_lost_the_store_for_longer_than_its_lease_hears_of_it(stage, proxy, tag):
    """Only this worker is cut off: for everybody else the lock has lapsed."""
    wait_for_breaker(stage)
    first = stage.call("hold", tag)
    stage.wait_for_begin(tag)

    proxy.cut()
    with Caller(stage, "hold", tag) as caller:
        second = caller.wait_for_admission()
    proxy.restore()

    lost = stage.wait_for_signal(first.id, "unique_lost")
    assert lost["reason"] == "its lock lapsed while it was running"
    stage.props.let_go(tag)  # the first body
    stage.wait_for_begin(tag, 2)
    assert stage.duplicate("hold", tag).id == second.task_id
    stage.props.let_go(tag)
    stage.end_of(stage.app.AsyncResult(second.task_id), "SUCCESS")
    assert [end["still_mine"] for end in stage.ends(tag)] == [False, True]


def test_task_goes_on_and_hears_of_it_when_the_store_has_lost_its_data(stage, store_server, tag):
    wait_for_breaker(stage)
    first = stage.call("hold", tag)
    stage.wait_for_begin(tag)
    database = int(stage.settings["unique_store_url"].rpartition("/")[2])

    with store_server.client(database) as client:
        client.flushdb()
    second = stage.call("quick", f"{tag}-other")
    assert stage.lock("hold", tag) is None
    stage.props.let_go(tag)

    stage.end_of(first, "SUCCESS")
    # The renewals may have noticed before its end did.
    reason = "its lock had lapsed or gone to another when it ended"
    eventually(
        lambda: reason in [lost["reason"] for lost in stage.signals(first.id, "unique_lost")]
    )
    stage.end_of(second, "SUCCESS")


# -- the caller ------------------------------------------------------------------------


class SilentStore:
    """A store that stops answering, in a given way, once it has been used."""

    def __init__(self, server: RedisServer, proxy: TcpProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.url = proxy.url_of(server.url)

    def go(self, how: str) -> None:
        {
            "gone": self.server.kill,
            "frozen": self.server.sigstop,
            "paused": lambda: self.server.pause(60),
            "stalled": self.proxy.stall,
        }[how]()


@pytest.fixture
def store(
    start_server: Callable[..., RedisServer], start_proxy: Callable[[int], TcpProxy]
) -> Iterator[SilentStore]:
    server = start_server(RedisServer)
    silent = SilentStore(server, start_proxy(server.port))
    yield silent
    if server.is_running():
        server.sigcont()


@pytest.fixture
def calling(redis_url: str, store: SilentStore) -> Iterator[Callable[..., Any]]:
    """An app without workers, whose store can go silent."""

    apps: list[Any] = []

    def make(**settings: Any) -> Any:
        app = staged_app(
            "faults",
            broker=redis_url,
            redis_url=redis_url,
            unique_store_url=store.url,
            unique_store_timeout=STORE_TIMEOUT_S,
            **settings,
        )
        apps.append(app)
        return app

    yield make
    for app in apps:
        forget_results(app)
        app.close()


@pytest.mark.parametrize("how", ["gone", "frozen", "paused", "stalled"])
def test_call_raises_within_the_time_out_of_a_silent_store(store, calling, tag, how):
    app = calling()
    quick = app.tasks["quick"]
    quick.delay(f"{tag}-warm")
    told: list[str] = []

    def receiver(act: str, **_: Any) -> None:
        told.append(act)

    unique_store_error.connect(receiver)
    store.go(how)

    times = []
    for n in range(6):
        began = time.monotonic()
        with pytest.raises(celery_unique.StoreUnavailable):
            quick.delay(f"{tag}-{n}")
        times.append(time.monotonic() - began)

    print(how, [f"{each * 1000:.0f} ms" for each in times])
    assert_left_alone(times)
    assert told == ["acquire"] * 6
    assert app.props.redis.llen("celery") == 1  # the warm one


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_call_is_published_within_the_time_out_where_that_is_wanted(store, calling, tag, how):
    app = calling(unique_on_store_error="publish")
    app.tasks["quick"].delay(f"{tag}-warm")
    store.go(how)

    times = []
    for n in range(6):
        began = time.monotonic()
        assert app.tasks["quick"].delay(f"{tag}-{n}").outcome == "bypassed"
        times.append(time.monotonic() - began)

    print(how, [f"{each * 1000:.0f} ms" for each in times])
    assert_left_alone(times)
    assert app.props.redis.llen("celery") == 7


def assert_left_alone(times: list[float]) -> None:
    """Two calls wait for the time-out, and the others for nothing: for five seconds.

    A busy machine may hold up one of each.
    """
    *others, _ = sorted(times[2:])
    assert min(times[:2]) < 2 * STORE_TIMEOUT_S, times
    assert max(others) < STORE_TIMEOUT_S / 2, times
