"""Calls that replace, succeed and postpone each other, with real workers on Redis."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from kombu import Consumer
from kombu.exceptions import OperationalError

from celery_unique import DuplicateTask, unique_superseded
from celery_unique.stores.record import Record, TaskEntry
from tests.stores.racing import Racers, overlap_of
from tests.support import RedisServer, eventually
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options
from tests.workers.conftest import MakeStage
from tests.workers.replaced import (
    Accepted,
    Watcher,
    judge,
    replace_racer,
)

#: What a busy machine may add to a wait for which nothing else is a bound.
SLACK_S = 20.0


@pytest.fixture(scope="module")
def make_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    make = MakeStage(redis_server, tmp_path_factory, tasks="replacing")
    yield make
    make.close()


@pytest.fixture(scope="module")
def shared_stage(make_stage: MakeStage) -> Stage:
    return make_stage()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """With a worker that sends events."""
    if not shared_stage.workers:
        shared_stage.start_worker(args=["-E"])
    return shared_stage


@pytest.fixture
def superseded() -> Iterator[list[tuple[str, str, str]]]:
    """What the signal told in this process: sender, the old id, the new one."""
    told: list[tuple[str, str, str]] = []

    def receiver(sender: str, task_id: str, by: str, **facts: Any) -> None:
        told.append((sender, task_id, by))

    unique_superseded.connect(receiver)
    yield told
    unique_superseded.disconnect(receiver)


@pytest.fixture
def events(stage: Stage) -> Iterator[list[dict[str, Any]]]:
    """The task-revoked events of the worker."""
    seen: list[dict[str, Any]] = []
    ready, stop = threading.Event(), threading.Event()

    def listen() -> None:
        with stage.app.connection_for_read() as connection:
            channel = connection.default_channel
            receiver = stage.app.events.Receiver(channel, {"task-revoked": seen.append})
            [consumer] = receiver.get_consumers(partial(Consumer, channel), channel)
            with consumer:
                ready.set()
                while not stop.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.2)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield seen
    stop.set()
    thread.join(10)


def assert_superseded(stage: Stage, old: Any, new: Any) -> None:
    """Ended in the result backend, at once, with the reason and the id."""
    ended = stage.app.AsyncResult(old.id)
    assert ended.state == "REVOKED"
    assert isinstance(ended.result, TaskRevokedError)
    assert str(ended.result) == f"superseded by task {new.id}"


def assert_dropped(stage: Stage, old: Any, new: Any, tag: str) -> None:
    """The worker has reached the old message: signal, the same end, no run, nothing left."""
    eventually(lambda: stage.told_revoked(old.id), timeout=20, message="not dropped")
    assert stage.told_revoked(old.id) == [
        {"signal": "task_revoked", "terminated": False, "expired": False}
    ]
    assert_superseded(stage, old, new)
    assert old.id not in [run["id"] for run in stage.runs(tag)]


# -- 1. one replaces another -----------------------------------------------------------


def test_a_replaced_task_ends_at_once_and_never_runs(stage, events, superseded, tag):
    """Prefetched: its worker is busy."""
    stage.send("hold", tag)
    stage.wait_for_run(tag)
    old = stage.send("replace", tag, 1)
    stage.worker.wait_for_log(rf"Task replace\[{old.id}\] received")

    new = stage.send("replace", tag, 2)

    assert (new.outcome, new.deduplicated) == ("replaced", False)
    assert superseded == [("replace", old.id, new.id)]
    assert_superseded(stage, old, new)
    stage.props.let_go(tag)
    assert stage.end_of(new, "SUCCESS") == 2
    assert_dropped(stage, old, new, tag)
    assert stage.values(tag) == [2]
    event = eventually(lambda: [each for each in events if each["uuid"] == old.id])[0]
    assert (event["terminated"], event["expired"]) == (False, False)
    stage.wait_until_nothing_is_left(new.unique_key)


def test_a_replaced_task_that_waits_for_its_eta_in_a_worker_never_runs(stage, tag):
    for countdown in (2, 8, 30):  # a busy machine may be late for the first
        tag = f"{tag}-{countdown}"
        old = stage.send("replace", tag, 1, countdown=countdown)
        stage.worker.wait_for_log(rf"Task replace\[{old.id}\] received")

        new = stage.send("replace", tag, 2)

        if new.outcome == "replaced":
            break

    assert_superseded(stage, old, new)
    assert stage.end_of(new, "SUCCESS") == 2
    assert_dropped(stage, old, new, tag)  # when its ETA has come
    assert stage.values(tag) == [2]
    stage.wait_until_nothing_is_left(new.unique_key)


def test_a_replaced_task_in_another_queue_never_runs(stage, tag):
    old = stage.send("replace", tag, 1, queue=f"other-{tag}")

    new = stage.send("replace", tag, 2)

    assert stage.end_of(new, "SUCCESS") == 2
    assert_superseded(stage, old, new)
    stage.app.control.add_consumer(f"other-{tag}", reply=True)
    assert_dropped(stage, old, new, tag)
    assert stage.values(tag) == [2]
    stage.wait_until_nothing_is_left(new.unique_key)


def test_a_task_replaced_by_one_with_an_eta_leaves_the_run_to_it(stage, tag):
    old = stage.send("replace", tag, 1, countdown=1, queue=f"held-back-{tag}")

    called_at = time.time()
    new = stage.send("replace", tag, 2, countdown=2)

    stage.deliver(f"held-back-{tag}")
    stage.wait_for_runs(tag)
    assert_dropped(stage, old, new, tag)
    [run] = stage.runs(tag)
    assert run["id"] == new.id
    assert 2 <= run["at"] - called_at < 2 + SLACK_S


@pytest.mark.parametrize("countdown", [None, 60], ids=["at once", "later"])
def test_the_schedule_of_a_replaced_task_is_kept(stage, tag, countdown):
    called_at = time.time()
    old = stage.send("keep_schedule", tag, 1, countdown=2, queue=f"held-back-{tag}")

    new = stage.send("keep_schedule", tag, 2, countdown=countdown)

    assert_superseded(stage, old, new)
    stage.deliver(f"held-back-{tag}")
    stage.wait_for_runs(tag)
    [run] = stage.runs(tag)
    assert (run["id"], run["value"]) == (new.id, 2)
    assert 1.9 <= run["at"] - called_at < 2 + SLACK_S
    assert_dropped(stage, old, new, tag)


def test_a_task_that_runs_is_not_replaced(stage, tag):
    running = stage.send("rerun", tag, 0)
    stage.wait_for_runs(tag)

    with pytest.raises(DuplicateTask) as rejected:
        stage.app.tasks["rerun"].apply_async((tag, 1), unique_on_conflict="replace")

    stage.props.let_go(tag)
    assert (rejected.value.task_id, rejected.value.state) == (running.id, "active")
    assert rejected.value.reason == "a task that runs cannot be replaced"
    assert stage.end_of(running, "SUCCESS") == 0
    assert stage.values(tag) == [0]


# -- 2. many processes -----------------------------------------------------------------


PROCESSES = 8
REPLACEMENTS = 2000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_one_act", [True, False], ids=["one act", "two steps"])
def test_of_thousands_of_replacements_none_vanishes_and_one_holds_the_key(
    make_stage, tag, report, in_one_act
):
    stage = make_stage(unique_atomic_publish=in_one_act)
    for _ in range(2):
        stage.start_worker(wait=False, pool="threads", concurrency=4)
    for worker in stage.workers:
        worker.wait_for_log(r" ready\.", 60)
    key = stage.key("work", tag)
    began = time.monotonic()

    with Racers(PROCESSES) as racers, Watcher(stage, key) as watcher:
        rounds = racers.race(replace_racer, stage.settings, tag, rounds=REPLACEMENTS // PROCESSES)
        took_s = time.monotonic() - began
        eventually(lambda: not stage.record_of(key).tasks, timeout=60, message="a task is left")
    stage.wait_until_nothing_is_left(key, timeout=60)

    calls = [
        Accepted(call.answer.task_id, call.began_ns, call.ended_ns)
        for each in rounds
        for call in each
    ]
    gave_way = {call.task_id: stage.superseded_by(call.task_id) for call in calls}
    superseded = {task_id: by for task_id, by in gave_way.items() if by is not None}
    runs = [run["id"] for run in stage.runs(tag)]
    rejected = sum(call.answer.rejected for each in rounds for call in each)
    report(
        f"replacing in {'one act' if in_one_act else 'two steps'}: "
        f"{PROCESSES} processes, {len(calls)} accepted ({rejected} rejected by a "
        f"running holder and made again), {len(runs)} ran, {len(superseded)} superseded; "
        f"{watcher.looks} looks, {watcher.with_one} with one holder, {len(watcher.wrong)} with "
        f"more, at most {watcher.most_in_limbo} in limbo; {overlap_of(rounds)}; {took_s:.1f} s"
    )
    assert len(calls) == REPLACEMENTS
    assert judge(calls, runs, superseded) == []
    assert len(runs) + len(superseded) == REPLACEMENTS
    assert watcher.wrong == []
    assert watcher.looks > 100
    assert (watcher.most_in_limbo > 0) is not in_one_act


def test_the_watcher_sees_two_holders_and_not_one_in_limbo(shared_stage):
    watcher = Watcher(shared_stage, "no key")
    old, new = TaskEntry("w", 0, 1), TaskEntry("p", 0, 1)

    watcher.see(Record(tasks={"old": replace(old, by="new"), "new": new}))
    watcher.see(Record(tasks={"old": old, "new": new}))

    assert (watcher.looks, watcher.with_one, watcher.most_in_limbo) == (2, 1, 1)
    assert watcher.wrong == [["old", "new"]]


def calls_in_order(*task_ids: str) -> list[Accepted]:
    return [Accepted(each, at, at + 0.5) for at, each in enumerate(task_ids)]


@pytest.mark.parametrize(
    ("runs", "superseded", "wrong"),
    [
        (["c"], {"a": "b", "b": "c"}, []),
        (["a", "c"], {"b": "c"}, []),
        (["c"], {"a": "b"}, ["a gave way to tasks of which none ran", "b vanished"]),
        (
            ["a"],
            {"b": "c"},
            [
                "b gave way to tasks of which none ran",
                "c vanished",
                "none of the last calls ran",
            ],
        ),
        (["c", "c"], {"a": "b", "b": "c"}, ["c ran 2 times"]),
        (["a", "c"], {"a": "b", "b": "c"}, ["a ran although it was superseded"]),
        (["a", "c"], {"b": "a"}, ["b gave way to the earlier a"]),
        (["c"], {"a": "x", "b": "c"}, ["a gave way to x, which nobody called"]),
        (["x", "c"], {"a": "b", "b": "c"}, ["x ran, but no call was told so"]),
    ],
)  # fmt: skip
def test_the_judge_sees_what_went_wrong(runs, superseded, wrong):
    assert sorted(judge(calls_in_order("a", "b", "c"), runs, superseded)) == sorted(wrong)


def test_the_judge_sees_calls_that_gave_way_in_a_circle():
    calls = [Accepted("a", 0, 9), Accepted("b", 0, 9), Accepted("c", 1, 9)]

    assert judge(calls, ["c"], {"a": "b", "b": "a"}) == [
        "a gave way to tasks of which none ran",
        "b gave way to tasks of which none ran",
    ]


# -- 3. a broker that fails ------------------------------------------------------------


KEYS = 50
REPLACES = 20


class FailingBroker:
    """Fails at random: before the message is out, or after it."""

    def __init__(self, app: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._send = app.amqp.send_task_message
        self.lost = self.landed = 0
        app.amqp.send_task_message = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        luck = self._random.random()
        if luck < 0.25:
            self.lost += 1
            raise OperationalError("not sent")
        sent = self._send(*args, **options)
        if luck < 0.5:
            self.landed += 1
            raise OperationalError("sent, but not acknowledged")
        return sent


@pytest.mark.slow
def test_a_broker_that_fails_at_random_leaves_no_key_with_neither(make_stage, tag, report):
    # In one act there is no time between the lock and the message at which the broker could fail.
    stage = make_stage(task_publish_retry=False, unique_atomic_publish=False)
    broker = FailingBroker(stage.app, seed=20)
    accepted: dict[str, list[str]] = {f"{tag}-{number}": [] for number in range(KEYS)}
    for value in range(REPLACES):
        for each, ids in accepted.items():
            try:
                ids.append(stage.send("replace", each, value).id)
            except OperationalError:
                continue

    stage.start_worker(pool="threads", concurrency=4)

    def records() -> list[Record]:
        return [stage.record("replace", each) for each in accepted]

    # Every message is reached; what was not sent leaves a mark that waits for it in vain.
    eventually(
        lambda: (
            not any(record.tasks for record in records())
            and sum(len(record.marks) + record.more_marks for record in records()) == broker.lost
        ),
        timeout=60,
        message="not every message was reached",
    )
    for each, ids in accepted.items():
        assert [run["id"] for run in stage.runs(each)] == ids[-1:]
    calls = sum(len(ids) for ids in accepted.values())
    report(
        f"failing broker: {KEYS * REPLACES} replaces of {KEYS} keys, {calls} accepted, "
        f"{broker.lost} not sent, {broker.landed} sent and not acknowledged; on every key the "
        "last accepted one ran, once, and nothing else"
    )
    assert broker.lost > 100
    assert broker.landed > 100


# -- 4. one running plus one queued ----------------------------------------------------


@pytest.mark.slow
def test_five_hundred_calls_during_a_run_give_one_more_with_the_last_arguments(
    make_stage, tag, report
):
    stage = make_stage()
    stage.start_worker(pool="threads", concurrency=2)
    stage.send("rerun", tag, 0)
    stage.wait_for_runs(tag)

    results = [stage.send("rerun", tag, value) for value in range(1, 501)]

    assert {result.outcome for result in results} == {"rerun"}
    assert [result.deduplicated for result in results] == [False] + [True] * 499
    assert len({result.id for result in results}) == 500
    # The successor waits without a slot of the pool, of which there are two.
    assert stage.end_of(stage.send("plain", tag), "SUCCESS") == tag
    assert stage.values(tag) == [0]
    stage.props.let_go(tag)
    assert stage.end_of(results[-1], "SUCCESS") == 500
    stage.wait_until_nothing_is_left(results[-1].unique_key, timeout=60)
    assert stage.values(tag) == [0, 500]
    for older, newer in itertools.pairwise(results):
        assert stage.superseded_by(older.id) == newer.id
    [ended] = [note for note in stage.props.notes(tag, "end") if note["value"] == 0]
    report(f"rerun: 500 calls, 1 more run, {stage.runs(tag)[1]['at'] - ended['at']:.2f} s after")


# -- 5. the holder's worker dies ---------------------------------------------------------------


KILLS = 5
KEYS_PER_KILL = 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_successor_runs_once_when_the_worker_of_its_holder_is_killed(make_stage, tag, report):
    stage = make_stage(
        pool="threads",
        unique_run_lease=2,
        broker_transport_options=redis_broker_options(4),
        worker_prefetch_multiplier=10,
    )
    took = []
    stage.start_worker(concurrency=KEYS_PER_KILL)
    for kill in range(KILLS):
        tags = [f"{tag}-{kill}-{number}" for number in range(KEYS_PER_KILL)]
        for each in tags:
            stage.send("rerun", each, 0)
        for each in tags:
            stage.wait_for_runs(each)
        successors = [stage.send("rerun", each, 1) for each in tags]
        assert {result.outcome for result in successors} == {"rerun"}
        stage.wait_until_worker_has([result.id for result in successors])

        stage.worker.kill()
        killed_at = time.time()
        stage.start_worker(concurrency=KEYS_PER_KILL)

        for each in tags:
            assert stage.wait_for_runs(each, 2, timeout=40) == [0, 1]
        took += [stage.runs(each)[1]["at"] - killed_at for each in tags]
        for result in successors:
            stage.wait_for_result(result, "SUCCESS")

    every_tag = [f"{tag}-{k}-{n}" for k in range(KILLS) for n in range(KEYS_PER_KILL)]
    assert {each: stage.values(each) for each in every_tag} == {each: [0, 1] for each in every_tag}
    report(
        f"successors of killed holders: {len(took)} of {KILLS * KEYS_PER_KILL} ran, once each, "
        f"{min(took):.1f} to {max(took):.1f} s after SIGKILL (run lease 2 s, visibility 4 s)"
    )


# -- 6. debounce -----------------------------------------------------------------------


def test_two_hundred_calls_in_two_seconds_are_one_run_with_the_last_arguments(stage, tag, report):
    for attempt in range(4):  # on a busy machine a second may pass between two of the calls
        tag = f"{tag}-{attempt}"
        began = time.time()
        results, called_at = [], [began]
        for value in range(200):
            results.append(stage.send("debounce", tag, value, countdown=1))
            called_at.append(time.time())
            time.sleep(max(0, began + (value + 1) * 0.01 - time.time()))
        if max(after - before for before, after in itertools.pairwise(called_at)) < 0.8:
            break
    last_call_at = called_at[-1]

    stage.wait_for_runs(tag)

    [run] = stage.runs(tag)
    assert (run["id"], run["value"]) == (results[-1].id, 199)
    stage.wait_until_nothing_is_left(results[-1].unique_key)
    assert stage.values(tag) == [199]
    after_s = run["at"] - last_call_at
    report(f"debounce: 200 calls in {last_call_at - began:.1f} s, 1 run {after_s:.2f} s after")
    # Seen 2.2 s late on a loaded machine, where the worker has 199 other messages to drop.
    assert 0.8 < after_s < 1 + SLACK_S


@pytest.mark.slow
def test_a_steady_stream_of_calls_runs_at_least_every_max_wait(stage, tag, report):
    began, calls = time.time(), 0
    while time.time() < began + 11:
        stage.send("debounce_bounded", tag, calls, countdown=2)
        calls += 1
        time.sleep(0.05)
    last = calls - 1

    eventually(lambda: last in stage.values(tag), timeout=30, message="the last call did not run")

    runs = stage.runs(tag)
    times = [began, *(run["at"] for run in runs)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    report(
        f"max_wait of 3 s: {calls} calls in 11 s, runs {[round(gap, 1) for gap in gaps]} s apart"
    )
    assert len(runs) >= 3
    assert max(gaps) < 7  # a busy machine may be late, but not by another max_wait
    values = [run["value"] for run in runs]
    assert values == sorted(set(values))


# -- 7. a task that schedules itself ---------------------------------------------------


def test_a_task_that_schedules_itself_runs_a_hundred_times_in_a_row(stage, tag, report):
    began = time.monotonic()
    first = stage.send("poll", tag)

    eventually(lambda: len(stage.props.notes(tag, "end")) >= 100, timeout=60)

    assert stage.values(tag) == list(range(1, 101))
    lines = stage.props.redis.lrange(f"diary:{tag}", 0, -1)
    order = ["run" if '"event": "run"' in line else "end" for line in lines]
    assert order == ["run", "end"] * 100, "two runs overlapped"
    stage.wait_until_nothing_is_left(first.unique_key)
    report(f"a task that schedules itself: 100 runs in {time.monotonic() - began:.1f} s")
