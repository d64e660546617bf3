"""A lock lasts as long as a worker has its message, in every pool, and no longer.

All scenes of this module are played at the same time: they consist of waiting.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from celery_unique.config.app_state import state_of
from celery_unique.worker.lock_client import WorkerLockClient
from tests.support import RedisServer, TcpProxy, eventually
from tests.support.stage import Stage
from tests.workers.faults.caller import Caller

pytestmark = pytest.mark.versions

POOLS = ("prefork", "threads", "solo", "gevent")
#: Renewed every second, so that a worker may stand still for two: nine of them share the machine.
RUN_LEASE_S = 3.0
QUEUE_LEASE_S = 3.0
#: Its lock lapses, unless it is renewed, a queue lease later: while the scenes are watched.
ETA_S = 4.0


@dataclass
class Scene:
    """A worker that holds messages, and callers that ask for their keys all the time."""

    stage: Stage
    #: task, tag and the id that holds the key
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)
    #: whether the delivery lease of everything that ran was alive in the end
    deliveries_alive: bool = False

    def call(self, task: str, **options: object) -> str:
        tag = uuid.uuid4().hex[:12]
        result = self.stage.call(task, tag, **options)
        self.calls.append((task, tag, result.id))
        return tag

    def hand_over(self, task: str, **options: object) -> None:
        """Call, and wait until the worker has the message."""
        self.call(task, **options)
        self.stage.worker.wait_for_log(rf"{self.calls[-1][2]}\] received")

    def watch(self, stack: ExitStack) -> None:
        for task, tag, _ in self.calls:
            caller = Caller(self.stage, task, tag, pause_s=0.1)
            self.callers.append(stack.enter_context(caller))

    def let_go(self) -> None:
        self.deliveries_alive = all(
            self.stage.entry(task, tag).delivery_lease > time.time() * 1000
            for task, tag, _ in self.calls
            if task.startswith("hold")
        )
        for task, tag, _ in self.calls:
            if task.startswith("hold"):
                self.stage.props.let_go(tag)

    def lost(self) -> list[str]:
        return [i for _, _, i in self.calls if self.stage.signals(i, "unique_lost")]

    def assert_never_lapsed(self) -> None:
        for (task, _, holder), caller in zip(self.calls, self.callers, strict=True):
            # A lock that has lapsed is seen by whichever call comes next.
            assert caller.lasted_s() > RUN_LEASE_S
            others = [a for a in caller.answers if a.task_id != holder]
            assert others == [], f"{task} was admitted beside {holder}"
        assert self.deliveries_alive
        assert self.lost() == []


@pytest.fixture(scope="module")
def pools(make_stage: Callable[..., Stage]) -> dict[str, Scene]:
    return {pool: Scene(make_stage(pool=pool, unique_run_lease=RUN_LEASE_S)) for pool in POOLS}


@pytest.fixture(scope="module")
def waiting(make_stage: Callable[..., Stage]) -> dict[str, Scene]:
    """Workers whose messages wait longer than the queue lease."""
    return {
        pool: Scene(
            make_stage(
                pool=pool,
                unique_run_lease=RUN_LEASE_S,
                unique_queue_lease=QUEUE_LEASE_S,
                restore_margin_s=-3600,
            )
        )
        for pool in POOLS
    }


@pytest.fixture
def short_queue_lease(waiting: dict[str, Scene]) -> Stage:
    return waiting["prefork"].stage


@pytest.fixture(scope="module")
def cut(make_stage: Callable[..., Stage], redis_server: RedisServer) -> Iterator[Scene]:
    """A worker that loses its connection to the broker in the middle of a task."""
    with TcpProxy(redis_server.port) as proxy:
        scene = Scene(make_stage(unique_run_lease=RUN_LEASE_S))
        scene.stage.broker_proxy = proxy
        yield scene


@pytest.fixture(scope="module", autouse=True)
def played(pools: dict[str, Scene], waiting: dict[str, Scene], cut: Scene) -> None:
    """More than a run lease of work, then a warm shutdown that waits for more than another."""
    everything = [*pools.values(), *waiting.values(), cut]
    for scene in pools.values():
        scene.stage.start_worker(wait=False, concurrency=2)
    for scene in waiting.values():
        scene.stage.start_worker(wait=False)
    through_proxy = cut.stage.broker_proxy.url_of(cut.stage.settings["broker"])
    cut.stage.start_worker(wait=False, settings={"broker": through_proxy})
    for scene in everything:
        scene.stage.wait_until_ready(scene.stage.worker)

    for pool, scene in pools.items():
        running = [scene.call("hold")] + ([scene.call("hold_late")] if pool != "solo" else [])
        for tag in running:
            scene.stage.wait_for_begin(tag)
    cut.stage.wait_for_begin(cut.call("hold"))
    for pool, scene in waiting.items():
        _let_messages_wait(scene, pool)

    with ExitStack() as stack:
        for scene in everything:
            scene.watch(stack)
        cut.stage.broker_proxy.cut()
        time.sleep(RUN_LEASE_S)
        cut.stage.broker_proxy.restore()
        time.sleep(0.4 * RUN_LEASE_S)
        for scene in pools.values():
            scene.stage.worker.send_signal(signal.SIGTERM)
        time.sleep(1.2 * RUN_LEASE_S)
    for scene in everything:
        scene.let_go()


def _let_messages_wait(scene: Scene, pool: str) -> None:
    """In a worker with room for one task: rate-limited, for an ETA, and behind another task."""
    stage = scene.stage
    stage.end_of(stage.call("limited", "takes the only token"), "SUCCESS")
    # First what has to wait in any case: a solo or gevent worker without room takes no message.
    scene.hand_over("limited")
    scene.hand_over("quick", countdown=ETA_S)
    stage.wait_for_begin(scene.call("hold"))
    if pool != "solo":  # which has nothing between the broker and the one task that it runs
        scene.hand_over("quick")


@pytest.mark.parametrize("pool", POOLS)
def test_lock_of_a_long_task_never_lapses_not_even_in_a_warm_shutdown(pools, pool):
    scene = pools[pool]

    eventually(lambda: not scene.stage.worker.is_running(), message="the worker did not end")

    print(f"{pool}: {[len(caller.answers) for caller in scene.callers]} calls, all duplicates")
    scene.assert_never_lapsed()
    for task, tag, holder in scene.calls:
        [end] = scene.stage.ends(tag)
        assert (end["id"], end["still_mine"]) == (holder, True)
        assert scene.stage.lock(task, tag) is None


@pytest.mark.parametrize("pool", POOLS)
def test_reserved_scheduled_and_rate_limited_messages_keep_their_keys(waiting, pool):
    scene = waiting[pool]
    print(f"{pool}: {[len(caller.answers) for caller in scene.callers]} calls, all duplicates")
    scene.assert_never_lapsed()

    # There is no token for the limited task; everything else runs once there is room.
    limited, *rest = scene.calls
    for task, tag, _ in rest:
        scene.stage.wait_until_free(task, tag)
        assert len(scene.stage.begins(tag)) == 1
    assert scene.stage.duplicate(*limited[:2]).id == limited[2]
    assert scene.lost() == []


def test_running_task_keeps_its_key_when_the_broker_connection_breaks(cut):
    cut.stage.worker.wait_for_log("Connection to broker lost")
    cut.assert_never_lapsed()

    [(task, tag, holder)] = cut.calls
    cut.stage.wait_until_free(task, tag)
    # The key is released before the result is stored.
    assert cut.stage.app.AsyncResult(holder).get(timeout=30) == tag


def test_end_of_a_body_is_not_taken_for_a_loss_while_celery_still_has_the_request(
    short_queue_lease, tag
):
    """Its result, its callbacks or its after_return take their time."""
    stage = short_queue_lease
    stage.start_worker(queues=["afterwards"])
    result = stage.call("wait_afterwards", tag, queue="afterwards")
    eventually(lambda: stage.props.notes(tag, "afterwards"))

    assert stage.lock("wait_afterwards", tag) is None
    time.sleep(0.7 * RUN_LEASE_S)  # two renewals
    stage.props.let_go(tag)

    stage.end_of(result, "SUCCESS")
    assert stage.signals(result.id, "unique_lost") == []


def test_message_that_nobody_holds_lapses_with_the_queue_lease(short_queue_lease, tag):
    result = short_queue_lease.call("quick", tag, queue="nobody")
    assert_lapses_within(QUEUE_LEASE_S, short_queue_lease, tag)

    short_queue_lease.wait_until_free("quick", tag)

    assert result.state == "PENDING"


def test_message_that_expires_does_not_hold_its_key_for_longer(short_queue_lease, tag):
    short_queue_lease.call("quick", tag, queue="nobody", expires=1)
    assert_lapses_within(1, short_queue_lease, tag)

    short_queue_lease.wait_until_free("quick", tag)


def assert_lapses_within(seconds: float, stage: Stage, tag: str) -> None:
    """Or has lapsed, on a machine that was busy since the call."""
    record = stage.record("quick", tag)
    assert all(task.lease <= (time.time() + seconds) * 1000 for task in record.tasks.values())


@pytest.fixture(scope="module")
def threads(pools: dict[str, Scene]) -> Stage:
    stage = pools["threads"].stage
    eventually(lambda: not stage.worker.is_running())
    stage.start_worker()
    return stage


def test_lock_of_a_task_that_left_its_thread_is_not_kept(threads, tag):
    result = threads.call("leave", tag)

    threads.wait_for_begin(tag)

    threads.wait_until_free("leave", tag)
    # Celery still counts it among its requests: the renewals must not bring it back.
    time.sleep(0.7 * RUN_LEASE_S)
    assert threads.lock("leave", tag) is None
    assert threads.signals(result.id, "unique_lost") == []


def test_renewal_of_another_delivery_changes_nothing(threads, tag):
    """Only the delivery that runs may renew, finish, settle or put a task off."""
    from celery_unique.header import LockHeader
    from celery_unique.stores.base import Held
    from celery_unique.stores.record import State

    result = threads.call("hold", tag)
    threads.wait_for_begin(tag)
    before = threads.entry("hold", tag)
    holding = state_of(threads.app).part(WorkerLockClient)
    key = threads.key("hold", tag)
    stranger = LockHeader(task_id=result.id, key=key, delivery="worker/1/boot/1")

    assert holding.store.renew([Held(key, result.id, stranger.delivery, 60_000, 60_000)]) == [False]
    assert holding.finish(stranger, "hold", State.COMPLETED).verdict == "not_yours"
    holding.settle(stranger, "hold", State.COMPLETED)
    holding.retry(stranger, "hold", 0, copies=False)
    holding.store.flush()

    after = threads.entry("hold", tag)
    assert (after.state, after.delivery, after.token) == ("r", before.delivery, before.token)
    assert after.lease < before.lease + 60_000
    assert threads.duplicate("hold", tag).id == result.id
    threads.props.let_go(tag)
    threads.end_of(result, "SUCCESS")
