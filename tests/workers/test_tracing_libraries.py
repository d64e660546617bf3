"""Sentry, OpenTelemetry, Datadog, Elastic APM and New Relic, each in a worker and beat of its own.

They add headers to messages, and wrap what Celery publishes and runs with. Nothing of that may
cost a lock, and the locks may not cost them their traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_unique
from tests.support import RedisServer, Worker, eventually
from tests.workers.apps.traced import ENDS, ENVIRONMENTS, RETRIED, TOOLS, traced_app

pytestmark = pytest.mark.slow

#: Its transaction is over when Celery publishes callbacks and the next link: with plain tasks, too,
#: each of these begins a trace.
ENDS_WITH_THE_BODY = {"newrelic"}

TASKS = {"auto": "retry_auto", "member1": "retry_auto"}


class Traced:
    def __init__(self, app: Celery, tool: str) -> None:
        self.app = app
        self.tool = tool
        self.props = app.props

    def runs(self, tag: str) -> list[dict[str, Any]]:
        """Each run of a body: the id of its task, its trace, and whether it held a lock."""
        return [json.loads(run) for run in self.props.redis.lrange(f"traced:{tag}", 0, -1)]

    def wait_for_runs(self, tag: str, number: int) -> list[dict[str, Any]]:
        return eventually(
            lambda: runs if len(runs := self.runs(tag)) >= number else None,
            timeout=60,
            message=f"{tag} did not run {number} times",
        )

    def lock(self, tag: str) -> celery_unique.Lock | None:
        name = TASKS.get(tag.rpartition("-")[2], "retry_self")
        return celery_unique.lookup(name, (tag,), app=self.app)

    def wait_until_free(self, tag: str) -> None:
        eventually(lambda: self.lock(tag) is None, message=f"the key of {tag} was not released")


@pytest.fixture(scope="module", params=list(TOOLS))
def traced(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: Any
) -> Iterator[Traced]:
    tool, url = request.param, redis_server.fresh_url()
    directory: Path = tmp_path_factory.mktemp(tool)
    worker = Worker(
        "tests.workers.apps.traced",
        log_path=directory / "worker.log",
        concurrency=6,  # as many bodies as wait at once
        args=["--beat", "--schedule", str(directory / "schedule")],
        env={
            "TRACED_TOOL": tool,
            "TRACED_REDIS": url,
            **ENVIRONMENTS.get(tool, {}),
            **(_NEWRELIC_ADMIN if tool == "newrelic" else {}),
        },
        # As newrelic-admin does: its agent must come before Celery.
        python_path=[_newrelic_bootstrap()] if tool == "newrelic" else [],
        forked=tool != "newrelic",
        name=tool,
    )
    app = traced_app(url)
    try:
        worker.start()
        yield Traced(app, tool)
    finally:
        worker.kill()
        app.close()


_NEWRELIC_ADMIN = {
    "NEW_RELIC_PYTHON_PREFIX": str(Path(sys.prefix).resolve()),
    "NEW_RELIC_PYTHON_VERSION": ".".join(map(str, sys.version_info[:2])),
}


def _newrelic_bootstrap() -> Path:
    spec = util.find_spec("newrelic")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bootstrap"


def test_retries_chains_and_chords_keep_their_locks_and_their_trace(traced, tag):
    traced.app.tasks["play"].delay(tag)

    # Each of them has retried, runs again, and holds its key.
    for name in RETRIED:
        first, again = traced.wait_for_runs(f"{tag}-{name}", 2)
        assert (first["id"], first["held"], again["held"]) == (again["id"], True, True), name
        lock = traced.lock(f"{tag}-{name}")
        assert lock is not None, name
        assert (lock.task_id, lock.state) == (first["id"], "active"), name
        task = traced.app.tasks[TASKS.get(name, "retry_self")]
        duplicate = task.delay(f"{tag}-{name}")
        assert (duplicate.deduplicated, duplicate.id) == (True, first["id"]), name

    for name in RETRIED:
        traced.props.let_go(f"{tag}-{name}")
    for name in RETRIED:
        traced.wait_until_free(f"{tag}-{name}")
    ended = [run for name in ENDS for run in traced.wait_for_runs(f"{tag}-{name}", 1)]

    assert traced.props.redis.lrange(f"outcomes:{tag}", 0, -1) == ["created", "deduplicated"]
    assert len(ended) == len(ENDS)
    retried = [run for name in RETRIED for run in traced.runs(f"{tag}-{name}")]
    assert len(retried) == 2 * len(RETRIED)
    [play] = traced.runs(tag)
    traces = retried if traced.tool in ENDS_WITH_THE_BODY else [*retried, *ended]
    assert {run["trace"] for run in traces} == {play["trace"]}
    assert play["trace"].strip("0")


def test_ticks_of_beat_are_duplicates_of_one_that_has_retried(traced):
    first, again = traced.wait_for_runs("tick", 2)
    assert (first["id"], first["held"], again["held"]) == (again["id"], True, True)
    assert first["trace"] == again["trace"]

    def ticked() -> bool:
        lock = traced.lock("tick")
        return lock is not None and lock.task_id == first["id"] and lock.duplicates >= 2

    eventually(ticked, message="no tick was a duplicate")
    assert len(traced.runs("tick")) == 2

    traced.props.let_go("tick")
    third = traced.wait_for_runs("tick", 3)[2]
    assert third["id"] != first["id"]
