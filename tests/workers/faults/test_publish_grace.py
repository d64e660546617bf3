"""A producer dies, or its publish fails, after it has taken the lock: no call is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError

import celery_unique
from celery_unique.config.app_state import state_of
from tests.support import Producers, eventually, is_alive
from tests.support.stage import STAGED, Stage, forget_results, staged_app
from tests.workers.faults.caller import Caller

#: Of calls whose grace shall be over soon.
GRACE_S = 2.0
#: Of all others: however busy the machine is, it is not over before the test has asked.
LONG_GRACE_S = 60.0
AT_ONCE = 4


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    # A publish in one act has no grace: see test_killed_producers.py.
    return make_stage(
        unique_publish_grace=LONG_GRACE_S, unique_run_lease=60, unique_atomic_publish=False
    )


@pytest.fixture(scope="module")
def producers(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Producers]:
    with Producers(
        "tests.workers.apps.slow_producer",
        env={STAGED: json.dumps(stage.settings)},
        log_path=tmp_path_factory.mktemp("producers") / "producers.log",
    ) as producers:
        eventually(lambda: stage.props.redis.llen("celery"), timeout=20)
        yield producers


def messages(stage: Stage) -> Counter[str]:
    """How many messages of each task id are in the broker."""
    lines = stage.props.redis.lrange("celery", 0, -1)
    return Counter(json.loads(line)["headers"]["id"] for line in lines)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(pid), interval=0.001)


def launch_and_kill(stage: Stage, producers: Producers, task: str, tag: str, n: int) -> None:
    """A call that dies: every third before it publishes, every third before it confirms, and
    the others at any moment."""
    if n % 3 == 0:
        times = {"before_publish_s": random.uniform(0, 0.02), "after_publish_s": 0.02}
        pid = producers.launch(task=task, tag=tag, **times)
        time.sleep(random.uniform(0, 0.06))
    else:
        times = {"before_publish_s": 0, "after_publish_s": 0}
        times["before_publish_s" if n % 3 == 1 else "after_publish_s"] = 60
        pid = producers.launch(task=task, tag=tag, **times)
        eventually(lambda: stage.lock(task, tag), interval=0.001)
        if n % 3 == 2:
            eventually(lambda: phase_of_death(stage, task, tag) == "after publish", interval=0.001)
    kill(pid)


def phase_of_death(stage: Stage, task_name: str, tag: str) -> str:
    tasks = stage.record(task_name, tag).tasks
    if not tasks:
        return "before acquire"
    [(task_id, task)] = tasks.items()
    if task.state != "p":
        return "after confirm"
    return "after publish" if messages(stage)[task_id] else "before publish"


def test_no_call_is_lost_to_producers_that_are_killed_anywhere(stage, producers):
    def one_round(n: int) -> tuple[str, str, str, float]:
        tag = f"killed-{n}"
        launch_and_kill(stage, producers, "quick", tag, n)
        phase = phase_of_death(stage, "quick", tag)
        began = time.monotonic()
        result = stage.app.tasks["quick"].delay(tag)
        took_s = time.monotonic() - began
        assert result.id in messages(stage), f"told {result.outcome} of nothing: {phase}"
        return phase, result.outcome, result.id, took_s

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rounds = list(pool.map(one_round, range(240)))

    print(f"{len(rounds)} producers killed, 0 calls lost:")
    for (phase, outcome), count in sorted(Counter(each[:2] for each in rounds).items()):
        slowest = max(each[3] for each in rounds if each[:2] == (phase, outcome))
        print(f"  {count:4} {phase:15} then {outcome:13} slowest answer {slowest * 1000:.0f} ms")
    phases = Counter(phase for phase, *_ in rounds)
    assert phases["before publish"] >= 80
    assert phases["after publish"] >= 80
    # Nobody was admitted beside a holder: within the grace the call helps it instead.
    for phase, outcome, _, _ in rounds:
        assert outcome == ("created" if phase == "before acquire" else "deduplicated")


def test_key_of_a_killed_producer_is_free_after_the_grace(stage, producers, tag):
    for attempt in range(ATTEMPTS):
        lock = killed_with_a_short_grace(stage, producers, f"{tag}-{attempt}")
        if lock is not None:
            break
    assert lock is not None

    stage.wait_until_free("quick", f"{tag}-{attempt}")
    blocked_s = (lock.expires_at - lock.created_at).total_seconds()
    print(f"the key was blocked for {blocked_s:.2f} s")
    assert blocked_s <= GRACE_S
    assert stage.call("quick", f"{tag}-{attempt}").id != lock.task_id


#: On a busy machine a short grace may be over before its lock is seen.
ATTEMPTS = 5


def killed_with_a_short_grace(
    stage: Stage, producers: Producers, tag: str
) -> celery_unique.Lock | None:
    """The lock that a producer has left, unless it was too late to see it."""
    pid = producers.launch(
        task="quick", tag=tag, before_publish_s=60, after_publish_s=0, grace_s=GRACE_S
    )
    given_up_at = time.monotonic() + 2 * GRACE_S
    while (lock := stage.lock("quick", tag)) is None and time.monotonic() < given_up_at:
        time.sleep(0.01)
    kill(pid)
    return lock


def test_caller_helps_a_producer_that_was_killed_before_it_published(stage, producers, tag):
    pid = producers.launch(task="quick", tag=tag, before_publish_s=60, after_publish_s=0)
    holder = stage.wait_for_state("quick", tag, state="pending").task_id
    kill(pid)
    assert holder not in messages(stage)

    result = stage.duplicate("quick", tag)

    assert result.id == holder
    assert messages(stage)[holder] == 1
    assert stage.wait_for_state("quick", tag, state="available").task_id == holder


def test_no_call_is_lost_to_publishes_that_fail_after_another_call_was_told(stage):
    """The first publish fails around the moment at which the second call helps it."""
    failing = staged_app(**stage.settings)
    publish = failing.amqp.send_task_message
    publishing: dict[str, threading.Event] = defaultdict(threading.Event)

    def send_task_message(producer: Any, name: str, message: Any, *args: Any, **kw: Any) -> Any:
        publishing[message.body[0][0]].set()
        time.sleep(random.uniform(0.06, 0.14))
        if random.random() < 0.5:
            publish(producer, name, message, *args, **kw)
        raise OperationalError("the publish may have landed, or not")

    failing.amqp.send_task_message = send_task_message

    def one_round(n: int) -> str:
        tag = f"failing-{n}"
        with ThreadPoolExecutor(1) as beside:
            first = beside.submit(failing.tasks["quick"].delay, tag)
            assert publishing[tag].wait(10)
            result = stage.app.tasks["quick"].delay(tag)
            with pytest.raises(OperationalError):
                first.result()
        assert result.id in messages(stage), f"told {result.outcome} of nothing"
        # No mark of the failed publish drops the message of the call that was accepted.
        store = state_of(stage.app).store
        record, _ = store.read(result.unique_key)
        assert result.id in record.tasks
        assert result.id not in record.marks
        return str(result.outcome)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = Counter(pool.map(one_round, range(120)))

    state_of(failing).store.close()
    forget_results(failing)
    failing.close()
    print(f"120 failing publishes, 0 calls lost: {dict(outcomes)}")
    assert set(outcomes) == {"created", "deduplicated"}


@pytest.fixture
def fresh_stage(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> Iterator[tuple[Stage, Producers]]:
    stage = make_stage(
        unique_publish_grace=LONG_GRACE_S, unique_run_lease=60, unique_atomic_publish=False
    )
    with Producers(
        "tests.workers.apps.slow_producer",
        env={STAGED: json.dumps(stage.settings)},
        log_path=tmp_path / "producers.log",
    ) as producers:
        eventually(lambda: stage.props.redis.llen("celery"), timeout=20)
        yield stage, producers


def test_every_call_that_was_answered_runs_once_although_producers_are_killed(fresh_stage):
    stage, producers = fresh_stage
    stage.start_worker(concurrency=2)

    def one_round(n: int) -> str:
        # A worker would take the message away before the producer is killed.
        tag, task = f"killed-{n}", "hold_late" if n % 2 else "hold"
        launch_and_kill(stage, producers, task, tag, n - n % 3 + n % 3 // 2)
        return str(stage.app.tasks[task].delay(tag).id)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ids = list(pool.map(one_round, range(60)))
    for n in range(len(ids)):
        stage.props.let_go(f"killed-{n}")
    for task_id in ids:
        stage.end_of(stage.app.AsyncResult(task_id), "SUCCESS")
    eventually(lambda: stage.props.redis.llen("celery") == 0)
    eventually(lambda: stage.props.redis.hlen("unacked") == 0)

    runs = [[run["id"] for run in stage.begins(f"killed-{n}")] for n in range(len(ids))]
    copies = len(re.findall(r"dropped \S+: it has already finished", stage.log()))
    print(f"{len(ids)} producers killed, every call ran once; {copies} copies were dropped")
    assert runs == [[task_id] for task_id in ids]


def test_caller_that_asks_all_the_time_is_admitted_at_most_once_in_a_grace(stage, producers, tag):
    for attempt in range(ATTEMPTS):
        lock = killed_with_a_short_grace(stage, producers, f"{tag}-{attempt}")
        if lock is None:
            continue
        with Caller(stage, "quick", f"{tag}-{attempt}") as caller:
            time.sleep(GRACE_S + 0.5)
        if caller.answers and caller.answers[0].at < lock.expires_at.timestamp():
            break

    assert lock is not None
    assert {answer.task_id for answer in caller.answers} == {lock.task_id}
    assert messages(stage)[lock.task_id] == 1
