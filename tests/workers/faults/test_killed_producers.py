"""A producer is killed at any system call of a publish: what it leaves in Redis.

Each test kills producers at points spread over the call; ``make prove`` kills one at every point,
before and after each system call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_unique.config.app_state import state_of
from tests.support.producers import REPOSITORY
from tests.support.stage import STAGED, Stage

#: How many points of each kind of call; 0: all.
POINTS = int(os.environ.get("CELERY_UNIQUE_KILLS", "15"))
KINDS = ("new", "new, not connected", "duplicate", "replace", "apply_many")
#: How many points there are at least in the calls of all kinds, of each way to publish.
FEWEST = 200


@pytest.fixture(scope="module", params=[True, False], ids=["one act", "two steps"])
def stage(make_stage: Callable[..., Stage], request: pytest.FixtureRequest) -> Stage:
    # Each system call of a traced process takes a switch to its tracer and back.
    slow = {"unique_store_timeout": 60, "unique_publish_grace": 120}
    return make_stage(unique_atomic_publish=request.param, **slow)


class TracedProducers:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.apps.traced_producer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**stage.env, STAGED: json.dumps(stage.settings)},
            text=True,
        )
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the traced producers ended"
        return line

    def run(self, kind: str, tag: str, kill_at: int = 0) -> dict[str, Any]:
        """Make one call; 0: to its end."""
        assert self._process.stdin is not None
        job = {"kind": kind, "tag": tag, "kill_at": kill_at}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self._read())
        assert outcome["outcome"] in ("returned", "killed"), outcome
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def producers(stage: Stage) -> Iterator[TracedProducers]:
    producers = TracedProducers(stage)
    yield producers
    producers.close()


def messages(stage: Stage) -> set[str]:
    lines = stage.props.redis.lrange("celery", 0, -1)
    return {json.loads(line)["headers"]["id"] for line in lines}


def left_behind(stage: Stage) -> Counter[str]:
    """What became of the calls: the state of each lock, with or without its message."""
    published, recorded, found = messages(stage), set[str](), Counter[str]()
    for _, record in state_of(stage.app).store.walk():
        recorded |= {*record.tasks, *record.marks}
        for task_id, task in record.tasks.items():
            state = "pending" if task.pending else "published"
            message = "its message" if task_id in published else "no message"
            found[f"{state} lock with {message}"] += 1
    found["message without a lock"] += len(published - recorded)
    return +found


def forget(stage: Stage) -> None:
    redis = stage.props.redis
    keys = [key for key in redis.keys("*") if not key.startswith("_kombu")]
    if keys:
        redis.delete(*keys)


@pytest.mark.slow
def test_a_producer_killed_at_any_system_call_leaves_no_message_without_a_lock(
    stage, producers, tag, record_property
):
    killed, there = 0, 0
    for number, kind in enumerate(KINDS):
        points, whole = kill_at_points(stage, producers, kind, f"{tag}-{number}")
        killed, there = killed + points, there + whole

    way = "one act" if stage.settings["unique_atomic_publish"] else "two steps"
    record_property("producers", f"{way}: producers killed at {killed} of {there} points")
    assert there >= FEWEST
    assert POINTS or killed == there


def kill_at_points(
    stage: Stage, producers: TracedProducers, kind: str, tag: str
) -> tuple[int, int]:
    """How many producers were killed in a call of this kind, and how many points it has."""
    whole = producers.run(kind, f"{tag}-whole")["stops"]
    forget(stage)
    number = min(whole, POINTS) if POINTS else whole
    points = sorted({1 + round(n * (whole - 1) / max(1, number - 1)) for n in range(number)})
    total: Counter[str] = Counter()
    for kill_at in points:
        mine = f"{tag}-{kill_at}"
        producers.run(kind, mine, kill_at)
        found = left_behind(stage)
        assert not found["message without a lock"], (kind, kill_at, found)
        assert not found["published lock with no message"], (kind, kill_at, found)
        if stage.settings["unique_atomic_publish"]:
            assert not found["pending lock with no message"], (kind, kill_at, found)
            assert not found["pending lock with its message"], (kind, kill_at, found)
        # A lock without a message is pending: the next call publishes it under its id.
        if found["pending lock with no message"]:
            call = f"{mine}-0" if kind == "apply_many" else mine
            assert stage.app.tasks["quick"].delay(call).id in messages(stage), (kind, kill_at)
        total += found
        forget(stage)

    print(f"\n{kind}: {len(points)} of {whole} points; {dict(sorted(total.items()))}")
    return len(points), whole
