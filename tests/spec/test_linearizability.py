"""Under concurrency every store replies as the pure acts do in some order: acts are atomic.

``make prove`` plays 100,000 acts on each store; ``make test`` plays fewer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from celery_unique.stores import acts
from celery_unique.stores.base import Start
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Record
from spec.linearizability.checker import Operation, check
from spec.linearizability.record_model import RecordModel, Timed
from spec.linearizability.run import Histories, acts_wanted, report_on
from spec.linearizability.stores import (
    ReadsAreOld,
    ReadsThenWrites,
    RedisWithoutScripts,
    opened,
)
from spec.linearizability.workload import Plan, record_in_processes, record_in_threads
from tests.stores import broken_lanes, broken_merging

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: How many acts make test plays.
FEW = 3000
STORES = [
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("valkey_url", id="valkey", marks=pytest.mark.server),
    pytest.param("cluster_url", id="cluster", marks=pytest.mark.server),
    pytest.param("sentinel_url", id="sentinel", marks=pytest.mark.server),
    pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
    pytest.param("mariadb_url", id="mariadb", marks=pytest.mark.server),
    pytest.param("sqlite_url", id="sqlite"),
]
#: What a workload that means something has in it, on any store.
COVERED = {
    "acquire: created",
    "acquire: created, replaces",
    "acquire: created, succeeds",
    "acquire: duplicate",
    "acquire: joined",
    "acquire: merged",
    "acquire: queued",
    "acquire: rejected",
    "cancel: cancelled",
    "finish: ended",
    "finish: not_yours",
    "give_back: True",
    "help: go",
    "parked: some",
    "promote: publish",
    "reap: some",
    "renew: more than 0",
    "start: done",
    "start: run",
    "start: run, with a payload",
    "start: superseded",
    "start: wait",
    "unmerge: True",
}
#: Parked calls have had their turn, by one of these.
CALLED = {"finish: calls", "reap: calls"}


#: How often the acts are played again, with other seeds, until all of that has come up.
ROUNDS = 6


@pytest.mark.parametrize("url_fixture", STORES)
def test_every_reply_of_a_store_is_explained_by_some_order_of_the_acts(
    url_fixture, request, report
):
    url, name = request.getfixturevalue(url_fixture), request.node.callspec.id

    def play(plan: Plan) -> Histories:
        return record_in_processes(partial(opened, url, f"lin{os.getpid()}n{plan.seed}"), plan)

    plan = Plan(acts_wanted(FEW), seed=int(time.time()))
    check_all(name, play, plan, report, overlap=0.2)


def test_every_reply_of_the_memory_store_is_explained_by_some_order_of_the_acts(report):
    def play(plan: Plan) -> Histories:
        return record_in_threads(MemoryStore(), plan)

    plan = Plan(acts_wanted(FEW), processes=1, threads=8, seed=int(time.time()))
    check_all("memory", play, plan, report, overlap=0.05)


def check_all(
    name: str,
    play: Callable[[Plan], Histories],
    plan: Plan,
    report: Callable[[str], None],
    overlap: float,
) -> None:
    coverage: set[str] = set()
    for n in range(ROUNDS):
        plan, began = replace(plan, seed=plan.seed + n), time.monotonic()
        histories = play(plan)
        played_s = time.monotonic() - began
        result = report_on(histories)
        report(
            f"linearizability of {name} (seed {plan.seed}): {result}; played in {played_s:.0f} s"
        )
        assert not result.violations, result.violations[0].story()
        assert result.operations >= plan.acts
        assert result.overlap > overlap
        coverage |= set(result.coverage)
        if coverage >= COVERED and coverage & CALLED:
            return
    assert coverage >= COVERED
    assert coverage & CALLED


@pytest.mark.parametrize("behind_ms", [0, 1, 4, 9])
def test_a_start_whose_clock_was_behind_that_of_the_start_before_it_is_explained(behind_ms):
    """Two processes have read the clock before either has the lock of the database."""
    history = two_starts(behind_ms)

    assert check(history, RecordModel(history)).linearizable


def test_a_start_before_it_was_called_is_not_explained():
    history = two_starts(behind_ms=60)

    assert not check(history, RecordModel(history)).linearizable


def two_starts(behind_ms: int) -> list[Operation]:
    """Both within 20 ms, and what is read then; the clock of the second was behind."""
    record, now_us, history = Record(), 1_000_010_000, []
    for n, task_id in enumerate(("a", "b")):
        start = Start(task_id, f"d{n}", "shop.rebuild", 1_800_000, 1_800_000, 1_800_000)
        reply = acts.start(record, start, now_us - n * behind_ms * 1000)
        timed = Timed((start,), 1_000_000, 1_000_000, 1_000_020)
        history.append(Operation("start", timed, reply, 0, 20))
    seen = Timed((), 1_000_000, 1_000_020, 1_000_021)
    return [*history, Operation("read", seen, record, 21, 22)]


@pytest.mark.parametrize("store_class", [ReadsThenWrites, ReadsAreOld])
def test_a_store_in_memory_that_is_not_atomic_is_caught(store_class):
    plan = Plan(3000, processes=1, threads=8)

    result = report_on(record_in_threads(store_class(), plan))

    assert result.violations
    assert "No order explains" in result.violations[0].story()


@pytest.mark.parametrize(
    "store_class",
    [
        *(broken_lanes.OvertakesParkedCalls, broken_lanes.CallsTheNewest),
        *(broken_merging.SwallowsValues, broken_merging.PutsTheNewestFirst),
    ],
)
def test_a_store_without_a_rule_of_lanes_or_merged_calls_is_caught(store_class):
    # One act after another: these stores are changed for the length of an act.
    plan = Plan(6000, processes=1, threads=1)

    result = report_on(record_in_threads(store_class(), plan))

    assert result.violations


@pytest.mark.server
def test_a_redis_store_that_reads_and_then_writes_is_caught(redis_url):
    result = report_on(record_in_processes(partial(RedisWithoutScripts, redis_url), Plan(2000)))

    assert result.violations
