"""Merged calls with real producers and workers on Redis: every number arrives, and only once.

``make test-merge`` has 10,000 calls in 10 s and 200 kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from celery_unique.config.app_state import state_of
from celery_unique.publish.stale_holders import healing
from celery_unique.publish.stale_holders.queues import NO_HURRY
from tests.support import RedisServer, eventually
from tests.support.producers import Producers
from tests.support.stage import Stage
from tests.workers.apps.merging import DIES
from tests.workers.conftest import MakeStage

CALLS = int(os.environ.get("CELERY_UNIQUE_MERGED", "400"))
SECONDS = max(1.0, CALLS / 1000)
KILLS = max(8, CALLS // 50)
PROCESSES = 8
#: How long a task may be recorded as waiting, and neither queued nor fetched, until it is lost.
LOST_AFTER_S = 5.0
PATIENCE_S = 90.0 + CALLS / 50

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S + 12 * KILLS)]


@pytest.fixture
def make_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    make = MakeStage(redis_server, tmp_path_factory, tasks="merging", concurrency=2)
    yield make
    make.close()


def accepted(stage: Stage, tag: str) -> dict[int, tuple[str, str]]:
    """Number -> outcome and id of every call that has returned."""
    lines = stage.props.redis.lrange(f"accepted:{tag}", 0, -1)
    return {number: (outcome, i) for number, outcome, i in map(json.loads, lines)}


def producers_of(stage: Stage) -> Producers:
    log_path = stage.directory / "producers.log"
    return Producers("tests.workers.merging_producers", env=stage.env, log_path=log_path)


def live_tasks(stage: Stage) -> list[str]:
    """The ids of tasks that block calls, or would run. One that has ended, and whose worker was
    killed between its acknowledgement and its settling, does neither."""
    store = state_of(stage.app).store
    records = [record for _, record in store.walk()]
    return [i for record in records for i, task in record.tasks.items() if not task.ending]


def wait_until_idle(stage: Stage) -> None:
    try:
        eventually(lambda: not live_tasks(stage), timeout=PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{live_tasks(stage)}; {in_broker(stage)}") from error


def in_broker(stage: Stage) -> tuple[int, int]:
    """How many messages are queued, and how many are fetched and not acknowledged."""
    redis = stage.props.redis
    return redis.llen(stage.app.conf.task_default_queue), redis.hlen("unacked")


def call_again_where_lost(stage: Stage, tag: str, number: int) -> int:
    """Wait until every task has run, and call once more where a message is lost, as the next caller
    would: kombu fetches a message from Redis and then records that, and a worker that is killed
    in between takes it along. Returns how often that was needed."""
    collect, needed, since = stage.app.tasks["collect_bounded"], 0, time.monotonic()
    give_up = since + PATIENCE_S
    while live_tasks(stage) and time.monotonic() < give_up:
        if in_broker(stage) != (0, 0):
            since = time.monotonic()
        elif time.monotonic() - since > LOST_AFTER_S:
            result = collect.delay(tag, [number + needed], 0.05)
            line = json.dumps([number + needed, result.outcome, result.id])
            stage.props.redis.rpush(f"accepted:{tag}", line)
            needed, since = needed + 1, time.monotonic()
        time.sleep(0.1)
    assert live_tasks(stage) == []
    return needed


def judge(stage: Stage, tag: str) -> dict[str, list[int]]:
    """The numbers that each task has ended with: the same in each of its runs, and none of them
    those of another one."""
    payloads: dict[str, list[int]] = {}
    for note in stage.props.notes(tag, "run"):
        assert payloads.setdefault(note["id"], note["numbers"]) == note["numbers"], note["id"]
    ended = {note["id"]: note["numbers"] for note in stage.props.notes(tag, "end")}
    assert ended.items() <= payloads.items()
    counts = Counter(number for numbers in ended.values() for number in numbers)
    assert [number for number, count in counts.items() if count > 1] == []
    assert set(accepted(stage, tag)) - set(counts) == set(), "lost numbers"
    return ended


def job(tag: str, first: int, last: int, seconds: float, **options: Any) -> dict[str, Any]:
    defaults = {"task": "collect", "countdown": 0.0, "work_s": 0.0}
    numbers = {"first": first, "last": last, "seconds": seconds}
    return {"tag": tag, **numbers, **defaults, **options}


@pytest.mark.parametrize("atomic", [True, False], ids=["one act", "two steps"])
def test_a_burst_of_calls_from_many_processes_is_one_run_with_all_numbers(
    make_stage, tag, report, atomic
):
    stage = make_stage(unique_atomic_publish=atomic)
    stage.start_worker()
    each = CALLS // PROCESSES
    with producers_of(stage) as producers:
        began = time.monotonic()
        for n in range(PROCESSES):
            producers.launch(**job(tag, n * each, (n + 1) * each, SECONDS, countdown=2))
        done = f"done:{tag}"
        eventually(lambda: stage.props.redis.llen(done) == PROCESSES, timeout=PATIENCE_S)
        took_s = time.monotonic() - began
    wait_until_idle(stage)

    ended = judge(stage, tag)
    outcomes = Counter(outcome for outcome, _ in accepted(stage, tag).values())
    messages = sum(count for outcome, count in outcomes.items() if outcome != "merged")
    runs = len(stage.props.notes(tag, "run"))
    total = sum(map(sum, ended.values()))
    report(
        f"merge, {'one act' if atomic else 'two steps'}: {each * PROCESSES} calls of {PROCESSES} "
        f"processes in {took_s:.1f} s: {messages} messages, {runs} runs, sum {total}"
    )
    assert total == sum(range(each * PROCESSES))
    assert outcomes.total() == each * PROCESSES
    assert messages <= 2
    assert runs <= 2


@pytest.mark.parametrize("atomic", [True, False], ids=["one act", "two steps"])
def test_kills_of_producers_and_workers_lose_no_number_of_a_call_that_returned(
    make_stage, tag, report, atomic, monkeypatch
):
    # The journal of this test is in lists of the broker's database. A call searches these, too, and
    # gives up beyond a thousand elements, so that it would never find that a message is lost.
    monkeypatch.setattr(healing, "OF_A_CALL", NO_HURRY)
    chance = random.Random(7)
    stage = make_stage(unique_atomic_publish=atomic)
    workers = [stage.start_worker(wait=False) for _ in range(2)]
    stage.wait_until_ready(*workers)
    calls, first, killed = 60, 0, Counter[str]()
    with producers_of(stage) as producers:

        def launch() -> int:
            nonlocal first
            first += calls
            options = {"countdown": chance.choice([0, 0.3]), "work_s": 0.05}
            options["task"] = "collect_bounded"
            return producers.launch(**job(tag, first, first + calls, 0.8, **options))

        pids = [launch() for _ in range(4)]
        while killed.total() < KILLS:
            pids = [pid if _exists(pid) else launch() for pid in pids]
            calls_made = stage.props.redis.llen(f"accepted:{tag}") + chance.randint(1, 12)
            eventually(
                lambda made=calls_made: stage.props.redis.llen(f"accepted:{tag}") >= made,
                timeout=PATIENCE_S,
            )
            if killed.total() % 4 == 3:
                chance.choice(workers).kill()
                workers = [each for each in workers if each.is_running()]
                workers.append(stage.start_worker(wait=False))
                killed["worker"] += 1
            else:
                place = chance.randrange(len(pids))
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pids[place], signal.SIGKILL)
                    killed["producer"] += 1
                pids[place] = launch()
        for pid in pids:
            eventually(lambda pid=pid: not _exists(pid), timeout=PATIENCE_S)
    stage.wait_until_ready(*workers)
    lost = call_again_where_lost(stage, tag, first + calls)

    ended = judge(stage, tag)
    returned = accepted(stage, tag)
    outcomes = Counter(outcome for outcome, _ in returned.values())
    runs = len(stage.props.notes(tag, "run"))
    report(
        f"merge with kills, {'one act' if atomic else 'two steps'}: {killed['producer']} producers "
        f"and {killed['worker']} workers killed; {len(returned)} calls returned "
        f"({outcomes['merged']} merged), {len(ended)} tasks in {runs} runs, 0 numbers lost, "
        f"0 in two tasks; {lost} messages that kombu had lost were published again by the next call"
    )
    assert outcomes["merged"] > 0


def test_a_worker_that_dies_between_fetching_and_recording_a_message_loses_no_number(
    make_stage, tag
):
    stage = make_stage()
    collect = stage.app.tasks["collect"]
    first = collect.delay(tag, [1])
    collect.delay(tag, [2])
    stage.props.redis.set(DIES, 1)
    worker = stage.start_worker(wait=False)
    eventually(lambda: not worker.is_running(), timeout=PATIENCE_S)
    assert in_broker(stage) == (0, 0)
    assert live_tasks(stage) == [first.id]

    stage.start_worker()
    time.sleep(LOST_AFTER_S)  # the holder is checked when it has waited for some seconds
    later = collect.delay(tag, [3])
    wait_until_idle(stage)

    assert (later.outcome, later.id) == ("merged", first.id)
    assert [note["numbers"] for note in stage.props.notes(tag, "end")] == [[1, 2, 3]]


def _exists(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
