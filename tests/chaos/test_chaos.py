"""A short chaos run on each broker; and that the checker, which passes it, can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.faults import kinds_of
from tests.chaos.journal import Event, Journal, read
from tests.chaos.previous import PREVIOUS, previous_release
from tests.chaos.report import Report
from tests.chaos.run import run
from tests.chaos.stage import Plan
from tests.chaos.stores import records_of
from tests.support.worker import REPOSITORY

EARLY = "tests.chaos.app.early"
LATE = "tests.chaos.app.late"
REPLACING = "tests.chaos.app.replacing"
KEYED = "tests.chaos.app.keyed"
MEMBER = "tests.chaos.app.member"
MERGING = "tests.chaos.app.merging"
QUEUEING = "tests.chaos.app.queueing"
#: A run with fewer has shown little.
BODIES = 50


# -- the real thing ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(240)
@pytest.mark.parametrize("broker", ["redis", "one redis", "rabbitmq"])
def test_nothing_is_lost_doubled_or_stuck_under_faults(broker, tmp_path):
    plan = Plan(broker=broker, seed=time.time_ns() % 10_000)
    kinds = [
        kind for kind in kinds_of(plan) if kind not in ("partition", "evicted", "out of memory")
    ]
    if broker == "redis":  # the rest, and the other stores, are make chaos
        kinds += ["partition", "evicted"]

    report = run(plan, tmp_path, 0, 2, kinds, BODIES)

    print(report.text())
    assert report.passed, report.text()
    assert len(report.story.runs) >= BODIES
    created = sum(call.outcome == "created" for call in report.story.calls)
    in_one_act = len(report.story.by_what["one_act"])
    assert in_one_act >= created if broker == "one redis" else in_one_act == 0
    done = report.story.by_what
    assert all(done[what] for what in ("many", "chord_ran", "revoked"))
    assert len(kinds) >= 8
    assert {"none", *(fault.kind for fault in report.story.faults)} >= {*kinds}
    evictions = [e for e in report.story.by_what["fault"] if e["fault"] == "evicted"]
    assert all(event["others"] or event["evicted"] for event in evictions)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(240)
@pytest.mark.parametrize("store", ["sentinel", "cluster", "postgresql", "mariadb"])
def test_nothing_is_lost_doubled_or_stuck_with_another_lock_store(store, tmp_path):
    plan = Plan(broker="redis", store=store, seed=time.time_ns() % 10_000)
    kinds = ["worker killed", "store restarted", *(["slots moved"] if store == "cluster" else [])]

    report = run(plan, tmp_path, seconds=0, episode_s=4, kinds=kinds, bodies=BODIES)

    print(report.text())
    assert report.passed, report.text()
    assert len(report.story.runs) >= BODIES
    assert {fault.kind for fault in report.story.faults} >= set(kinds)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(240)
def test_two_releases_work_side_by_side_under_faults(tmp_path):
    """Callers and workers of both, crossed; each one that is started again is of the other."""
    previous = previous_release(PREVIOUS, tmp_path)
    plan = Plan(broker="one redis", seed=time.time_ns() % 10_000, previous=str(previous))

    report = run(plan, tmp_path, 0, 4, ["none", "worker killed", "producer killed"], BODIES)

    print(report.text())
    assert report.passed, report.text()
    assert len(report.story.runs) >= BODIES
    started = [event for event in read(tmp_path) if event["what"] == "started"]
    assert {(event["role"], event["previous"]) for event in started} == {
        (role, is_previous) for role in ("worker", "producer") for is_previous in (True, False)
    }


def test_the_processes_of_the_previous_release_import_its_code(tmp_path):
    tree = previous_release(PREVIOUS, tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", "import celery_unique; print(celery_unique.__file__)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == str(tree / "celery_unique" / "__init__.py")


def test_a_previous_release_that_the_history_lacks_is_an_error_with_the_cure(tmp_path):
    with pytest.raises(RuntimeError, match=r"Commit 0{40} .* git fetch --unshallow"):
        previous_release("0" * 40, tmp_path)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("broken", "finding"), [("acquire", "overlap"), ("renew", "lapsed")])
def test_a_broken_store_is_found_out(broken, finding, tmp_path):
    plan = Plan(
        broker="redis",
        seed=1,
        broken=broken,
        tasks=("early", "late"),
        long_bodies=0.25,
        keys=2,
        calls_per_s=4,
        producers=2,
    )

    report = run(plan, tmp_path, seconds=0, episode_s=4, kinds=["none"])

    assert not report.passed
    assert finding in {violation.what for violation in report.violations}
    assert "VIOLATION" in report.text()


# -- the checker, on journals made by hand ------------------------------------------------


class Scene:
    """A journal as a run would write it: one key, and what the test says happened to it."""

    def __init__(self, *, broker: str = "rabbitmq", task: str = EARLY) -> None:
        self._key = {"task": task, "arg": 1}
        self._calls = 0
        self.events: list[Event] = []
        self._note("settings", 0, broker=broker, store="redis", clock_offset=0, **_LEASES)
        self._note("episode", 0, fault="none")

    def _note(self, what: str, t: float, **facts: Any) -> None:
        self.events.append({"t": t, "what": what, **facts})

    def call(
        self,
        t: float,
        task_id: str,
        *,
        outcome: str = "created",
        returned: float | None = None,
        **more: str,
    ) -> None:
        self._calls += 1
        facts = {"call": f"p1/1/{self._calls}", "pid": 1, **self._key, **more}
        self._note("call", t, **facts)
        if outcome in ("created", "replaced", "rerun"):
            self._note("published", t + 0.01, id=task_id, role="p1", pid=1)
        self._note("called", returned or t + 0.02, id=task_id, outcome=outcome, **facts)

    def revoked(self, t: float, task_id: str, *, returned: float | None = None) -> None:
        self._calls += 1
        facts = {"revoke": f"p1/1/{self._calls}", "id": task_id, "pid": 1}
        self._note("revoke", t, **facts)
        if returned is not None:
            self._note("revoked", returned, **facts)

    def asked(self, t: float, task_id: str, worker: str = "w1") -> None:
        self._note("asked", t, id=task_id, worker=worker)

    def chord(self, t: float, *members: str) -> None:
        facts = {"chord": "p1/1/c", "args": [1] * len(members), "pid": 1}
        self._note("chord", t, **facts)
        self._note("chord_called", t + 0.02, members=members, body="body", **facts)

    def chord_ran(self, t: float) -> None:
        self._note("chord_ran", t, chord="p1/1/c", values=[1, 1])

    def died_in_call(self, t: float) -> None:
        self._calls += 1
        self._note("call", t, call=f"p1/1/{self._calls}", pid=1, **self._key)

    def received(self, t: float, task_id: str, worker: str = "w1", delivery: str = "") -> None:
        delivery = delivery or f"{worker}/{task_id}"
        self._note("received", t, id=task_id, worker=worker, pid=10, delivery=delivery)

    def ran(
        self,
        start: float,
        end: float | None,
        task_id: str,
        worker: str = "w1",
        *,
        outcome: str = "success",
        token: int = 7,
        still_mine: bool | None = True,
        pid: int = 10,
        **more: Any,
    ) -> None:
        run = {"id": task_id, **more, "worker": worker, "pid": pid, "token": token, "retries": 0}
        run |= {"delivery": f"{worker}/{task_id}/{start}", **self._key}
        self.received(start - 0.01, task_id, worker, run["delivery"])
        self._note("start", start, **run)
        if end is not None:
            self._note("end", end, outcome=outcome, still_mine=still_mine, **run)

    def lost(
        self,
        t: float,
        task_id: str,
        worker: str = "w1",
        reason: str = "its lock lapsed while it was running",
    ) -> None:
        self._note("lost", t, id=task_id, worker=worker, pid=10, reason=reason)

    def ack(self, t: float, task_id: str, worker: str = "w1", pid: int = 10) -> None:
        self._note("ack", t, id=task_id, worker=worker, pid=pid)

    def fault(self, kind: str, t: float, until: float, target: str = "", **facts: Any) -> None:
        self._note("fault", t, until=until, fault=kind, target=target, **facts)

    def left(self, *, locks: int = 0, messages: int = 0) -> None:
        lock = {"key": "1:k", "id": "a", "state": "w", "task": EARLY, "created": 2000}
        self._note("left", 99, locks=[lock] * locks, marks=0)
        self._note("ended", 100, waiting=messages)

    def report(self) -> Report:
        return check(sorted(self.events, key=lambda event: event["t"]))

    def violations(self) -> list[str]:
        report = self.report()
        assert report.text()  # it can always be shown
        return [finding.what for finding in report.violations]

    def explained(self) -> list[str]:
        return [f.what for f in self.report().findings if f.explained]


_LEASES = {"run_lease": 3, "queue_lease": 20, "grace": 5, "visibility": 4, "longest_lease": 21}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_run_without_incident_passes(scene):
    scene.call(1, "a")
    scene.call(1.1, "a", outcome="deduplicated")
    scene.ran(1.2, 1.4, "a")
    scene.call(2, "b")
    scene.ran(2.2, 2.4, "b")
    scene.left()

    assert scene.violations() == []


# -- lost


def test_an_accepted_call_that_never_ran_is_lost(scene):
    scene.call(1, "a")

    assert scene.violations() == ["lost"]


def test_a_duplicate_of_a_task_that_never_ran_is_lost(scene):
    scene.call(1, "a", outcome="deduplicated")

    assert scene.violations() == ["lost"]


def test_a_retry_that_never_came_is_lost(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a", outcome="retry")

    assert scene.violations() == ["lost"]


def test_an_early_acknowledged_task_may_die_with_its_process(scene):
    scene.call(1, "a")
    scene.ran(1.2, None, "a", pid=11)
    scene.fault("pool child killed", 1.3, 1.31, "w1", pids=[11])

    assert scene.violations() == []
    assert scene.explained() == ["lost"]


def test_an_early_acknowledged_task_may_die_before_its_body_began(scene):
    scene.call(1, "a")
    scene.ack(1.25, "a", pid=11)
    scene.fault("pool child killed", 1.3, 1.31, "w1", pids=[11])

    assert scene.violations() == []


def test_the_death_of_another_process_explains_nothing(scene):
    scene.call(1, "a")
    scene.ack(1.25, "a", pid=11)
    scene.fault("pool child killed", 1.3, 1.31, "w1", pids=[12])

    assert scene.violations() == ["lost"]


def test_a_late_acknowledged_task_may_not_die_with_its_process():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, None, "a", pid=11)
    scene.fault("worker killed", 1.3, 1.31, "w1", pids=[10, 11])

    assert scene.violations() == ["lost"]


def test_a_body_that_vanished_without_a_kill_is_found(scene):
    scene.call(1, "a")
    scene.ran(1.2, None, "a")

    assert scene.violations() == ["lost", "unended"]


def test_a_message_that_redis_gave_to_a_dying_worker_is_lost_by_the_broker():
    scene = Scene(broker="redis", task=LATE)
    scene.call(1, "a")
    scene.fault("worker killed", 1.1, 1.2, "w1", pids=[10])

    assert scene.violations() == []
    assert scene.explained() == ["lost by broker"]


def test_a_message_is_handed_out_before_those_that_were_published_later():
    scene = Scene(broker="redis", task=LATE)
    scene.call(1, "a")
    scene.fault("worker killed", 3.1, 3.2, "w1", pids=[10])
    scene.call(4, "b")
    scene.ran(4.1, 4.2, "b")
    assert scene.violations() == []

    scene.call(1.5, "c")
    scene.ran(1.8, 1.9, "c")

    assert scene.violations() == ["lost"]


def test_so_is_one_that_came_back_and_was_given_to_a_dying_worker():
    scene = Scene(broker="redis", task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, None, "a", pid=10)
    scene.fault("worker killed", 1.3, 1.4, "w1", pids=[10])
    assert scene.violations() == ["lost"]

    scene.fault("worker killed", 5.5, 5.6, "w2", pids=[20])

    assert scene.violations() == []
    assert scene.explained() == ["lost by broker"]


def test_rabbitmq_loses_no_message():
    scene = Scene(broker="rabbitmq", task=LATE)
    scene.call(1, "a")
    scene.fault("worker killed", 1.1, 1.2, "w1", pids=[10])

    assert scene.violations() == ["lost"]


def test_a_message_that_was_received_is_not_lost_by_the_broker():
    scene = Scene(broker="redis", task=LATE)
    scene.call(1, "a")
    scene.received(1.05, "a")
    scene.fault("worker killed", 1.1, 1.2, "w1", pids=[10])

    assert scene.violations() == ["lost"]


# -- merged


def test_the_values_of_merged_calls_are_in_one_run():
    scene = Scene(task=MERGING)
    scene.call(1, "a", value="1")
    scene.call(1.1, "a", outcome="merged", value="2")
    scene.ran(2, 2.2, "a", values=["1", "2"])

    assert scene.violations() == []


def test_a_merged_value_that_no_run_got_is_lost():
    scene = Scene(task=MERGING)
    scene.call(1, "a", value="1")
    scene.call(1.1, "a", outcome="merged", value="2")
    scene.ran(2, 2.2, "a", values=["1"])

    assert scene.violations() == ["lost"]


def test_a_merged_value_in_two_tasks_is_found():
    scene = Scene(task=MERGING)
    scene.call(1, "a", value="1")
    scene.call(1.1, "a", outcome="merged", value="2")
    scene.ran(2, 2.2, "a", values=["1", "2"])
    scene.call(3, "b", value="3")
    scene.ran(4, 4.2, "b", values=["2", "3"])

    assert scene.violations() == ["twice"]


# -- several calls at once


def test_each_call_of_apply_many_is_a_call_like_others(scene):
    scene.call(1, "a", returned=1.5)
    scene.call(1, "b", returned=1.5)
    scene.call(1, "a", returned=1.5, outcome="deduplicated")
    scene.ran(1.6, 1.8, "a")
    assert scene.violations() == ["lost"]

    scene.ran(1.9, 2.1, "b")

    assert scene.violations() == []


# -- chords


def test_the_body_of_a_chord_runs_whose_members_are_duplicates():
    scene = Scene(task=MEMBER)
    scene.chord(1, "a", "follower")
    scene.ran(1.2, 1.4, "a")
    assert scene.violations() == ["lost"]

    scene.chord_ran(1.6)

    assert scene.violations() == []


def test_a_chord_whose_call_raised_promises_nothing():
    scene = Scene(task=MEMBER)
    scene._note("chord", 1, chord="p1/1/c", args=[1, 1], pid=1)

    assert scene.violations() == []


def test_a_member_that_redis_gave_to_a_dying_worker_keeps_its_chord_waiting():
    scene = Scene(broker="redis", task=MEMBER)
    scene.chord(1, "a", "b")
    scene._note("published", 1.01, id="a", role="p1", pid=1)
    assert scene.violations() == ["lost"]

    scene.fault("worker killed", 1.1, 1.2, "w1", pids=[10])

    assert scene.violations() == []
    assert scene.explained() == ["lost by broker"]


def test_the_followers_of_an_evicted_record_are_lost_with_it():
    scene = Scene(task=MEMBER)
    scene.chord(1, "a", "follower")
    scene.ran(1.2, 4, "a")
    scene.lost(3, "follower", reason="the lock store lost this follower of task a")
    assert scene.violations() == ["lost", "lapsed"]

    scene.fault("evicted", 2, 2.05, evicted=["cu:{1}:k"], **EVICTED)

    assert scene.violations() == []
    assert scene.explained() == ["lost with record", "lapsed"]


@pytest.mark.parametrize(("store", "found"), [("redis", ["lost"]), ("cluster", [])])
def test_only_a_failover_loses_followers(store, found):
    scene = Scene(task=MEMBER)
    scene.events[0]["store"] = store
    scene.chord(1, "a", "follower")
    scene.ran(1.2, 4, "a")
    scene.fault("store restarted", 2, 2.5)

    assert scene.violations() == found


# -- revoked


def test_a_revoked_task_need_not_run_nor_do_its_duplicates(scene):
    scene.call(1, "a")
    scene.call(1.1, "a", outcome="deduplicated")
    scene.revoked(2, "a", returned=2.1)

    assert scene.violations() == []


def test_a_revoke_whose_caller_died_may_have_been_done(scene):
    scene.call(1, "a")
    scene.revoked(2, "a")

    assert scene.violations() == []


def test_the_revoke_of_another_task_explains_no_loss(scene):
    scene.call(1, "a")
    scene.revoked(2, "b", returned=2.1)

    assert scene.violations() == ["lost"]


def test_a_revoked_task_that_begins_afterwards_is_found(scene):
    scene.call(1, "a")
    scene.revoked(2, "a", returned=2.1)
    scene.asked(2.5, "a")
    scene.ran(2.6, 2.8, "a")

    assert scene.violations() == ["revoked"]


def test_a_task_that_passed_its_gate_before_its_revoke_may_begin_later(scene):
    scene.call(1, "a")
    scene.asked(2.05, "a")
    scene.revoked(2, "a", returned=2.1)
    scene.ran(4, 4.2, "a")

    assert scene.violations() == []


def test_a_retry_of_a_task_that_was_revoked_while_it_ran_may_be_dropped():
    scene = Scene(task="tests.chaos.app.late_retrying")
    scene.call(1, "a")
    scene.ran(1.2, 1.8, "a", outcome="retry")
    scene.revoked(1.5, "a", returned=1.6)
    scene.call(1.7, "a", outcome="deduplicated")

    assert scene.violations() == []


def test_a_duplicate_of_a_task_whose_revoke_has_returned_is_lost(scene):
    scene.call(1, "a")
    scene.revoked(2, "a", returned=2.1)
    scene.call(2.2, "a", outcome="deduplicated")

    assert scene.violations() == ["lost"]


def test_a_duplicate_of_a_task_that_was_killed_behind_its_gate_and_revoked_shares_its_end(scene):
    scene.call(1, "a")
    scene.asked(1.4, "a", "w2")
    scene.fault("worker killed", 1.5, 1.6, "w2")
    scene.revoked(2, "a", returned=2.1)
    scene.call(2.2, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(5, "a", outcome="deduplicated")  # its lock has lapsed
    assert scene.violations() == ["lost"]


def test_a_worker_that_was_killed_before_it_asked_explains_no_duplicate(scene):
    scene.call(1, "a")
    scene.fault("worker killed", 1.2, 1.3, "w1")
    scene.asked(1.4, "a", "w2")
    scene.fault("worker killed", 1.5, 1.6, "w1")
    scene.revoked(2, "a", returned=2.1)
    scene.call(2.2, "a", outcome="deduplicated")

    assert scene.violations() == ["lost"]


def test_a_worker_that_had_dropped_the_message_and_was_killed_later_explains_no_duplicate(scene):
    scene.call(1, "a")
    scene.asked(1.4, "a", "w2")
    scene.ack(1.5, "a", "w2")
    scene.revoked(2, "a", returned=2.1)
    scene.fault("worker killed", 6, 6.1, "w2")
    scene.call(8, "a", outcome="deduplicated")

    assert scene.violations() == ["lost"]


def test_a_revoke_is_forgotten_with_the_record_that_has_its_mark(scene):
    scene.call(1, "a")
    scene.revoked(2, "a", returned=2.1)
    scene.call(4, "a", outcome="deduplicated")
    assert scene.violations() == ["lost"]

    scene.fault("evicted", 3, 3.1, evicted=["cu:{1}:k"], **EVICTED)

    assert scene.violations() == []
    assert scene.explained() == ["swallowed"]


def test_a_revoke_may_miss_a_store_that_its_caller_cannot_reach(scene):
    scene.call(1, "a")
    scene.call(1.1, "b")
    scene.fault("connection cut", 1.5, 2.5, "producers", link="store", mode="cut")
    scene.revoked(2, "a", returned=2.1)
    scene.ran(3, 3.2, "a")
    scene.revoked(2, "b", returned=2.1)
    scene.call(4, "b", outcome="deduplicated")
    assert scene.violations() == []
    assert scene.explained() == ["revoked", "swallowed"]

    scene.call(9, "c")
    scene.revoked(10, "c", returned=10.1)
    scene.ran(11, 11.2, "c")

    assert scene.violations() == ["revoked"]


# -- superseded


def test_a_task_that_a_later_call_replaced_need_not_run():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.call(2, "b", outcome="replaced")
    scene.ran(3, 3.2, "b")

    assert scene.violations() == []


def test_a_replacement_that_never_ran_is_lost():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.call(2, "b", outcome="replaced")

    assert scene.violations() == ["lost"]


def test_a_later_call_that_replaced_nothing_explains_no_loss():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.call(2, "b")
    scene.ran(3, 3.2, "b")

    assert scene.violations() == ["lost"]


def test_a_caller_that_died_may_have_replaced_a_task():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.died_in_call(2)
    scene.ran(3, 3.2, "b")

    assert scene.violations() == []


def test_a_caller_of_ignored_duplicates_that_died_replaced_nothing(scene):
    scene.call(1, "a")
    scene.died_in_call(2)
    scene.ran(3, 3.2, "b")

    assert scene.violations() == ["lost"]


def test_a_replaced_task_that_begins_afterwards_is_found():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.call(2, "b", outcome="replaced")
    scene.ran(3, 3.2, "b")
    scene.ran(4, 4.2, "a")

    assert scene.violations() == ["superseded"]


def test_a_replaced_task_may_begin_where_the_gate_cannot_reach_the_store():
    scene = Scene(task=REPLACING)
    scene.call(1, "a")
    scene.call(2, "b", outcome="replaced")
    scene.ran(3, 3.2, "b")
    scene.fault("connection cut", 3.5, 4.1, "w1", link="store", mode="stall")
    scene.ran(4, 4.2, "a", token=0)

    assert scene.violations() == []
    assert scene.explained() == ["superseded"]


# -- swallowed


def test_a_call_rejected_for_a_task_that_had_ended_is_swallowed(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.call(4, "a", outcome="rejected")

    assert scene.violations() == ["swallowed"]


def test_a_rejection_promises_nothing(scene):
    scene.call(1, "a", outcome="rejected")

    assert scene.violations() == []


def test_an_idempotency_key_is_kept_for_its_time_and_no_longer():
    scene = Scene(task=KEYED)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.call(3.9, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(6, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_an_idempotency_key_is_kept_until_the_message_is_acknowledged():
    scene = Scene(task=KEYED)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.fault("connection cut", 1.3, 6.5, "w1", link="broker", mode="stall")
    scene.call(6, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(17, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_a_key_without_a_time_does_not_wait_for_the_acknowledgement():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.fault("connection cut", 1.3, 6.5, "w1", link="broker", mode="stall")
    scene.call(6, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_a_call_answered_by_a_task_that_had_ended_is_swallowed(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.call(4, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_a_call_may_be_answered_by_a_task_whose_worker_could_not_give_back(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.fault("worker killed", 1.45, 1.5, "w1", pids=[10])
    scene.call(4, "a", outcome="deduplicated")

    assert scene.violations() == []


def test_a_task_that_ran_without_the_store_may_have_to_outlive_a_dead_lease(scene):
    scene.call(1, "a")
    scene.fault("connection cut", 0.2, 0.8, "w1", link="store", mode="cut")
    scene.ran(4.2, 4.4, "a", token=0)
    scene.call(6, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(11, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_a_key_that_stays_taken_for_long_has_no_excuse(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.fault("worker killed", 1.45, 1.5, "w1", pids=[10])
    scene.call(15, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_an_open_circuit_delays_a_release_for_a_moment(scene):
    scene.call(1, "a")
    scene.fault("store restarted", 1.5, 2.0)
    scene.ran(5, 5.2, "a")
    scene.call(6.5, "a", outcome="deduplicated")
    assert scene.violations() == []
    assert scene.explained() == ["swallowed"]

    scene.call(8, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


def test_a_duplicate_of_a_task_whose_other_delivery_continues_is_none_of_an_ended_one(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.ran(1.3, 4.5, "a", "w2", outcome="retry")
    scene.call(4, "a", outcome="deduplicated")

    assert "swallowed" not in scene.violations()

    scene.call(9, "a", outcome="deduplicated")

    assert "swallowed" in scene.violations()


# -- two at once


def test_two_tasks_of_one_key_at_once_are_found(scene):
    scene.call(1, "a")
    scene.call(1.1, "b")
    scene.ran(1.2, 2, "a", "w1")
    scene.ran(1.5, 2.5, "b", "w2")

    assert scene.violations() == ["overlap"]


def test_two_deliveries_of_one_task_at_once_are_found():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 2, "a", "w1")
    scene.ran(1.5, 2.5, "a", "w2")

    assert scene.violations() == ["overlap", "twice"]


def test_a_stopped_worker_explains_two_at_once(scene):
    scene.call(1, "a")
    scene.ran(1.2, 7, "a", "w1", still_mine=False)
    scene.fault("worker stopped", 1.5, 6, "w1")
    scene.call(5, "b")
    scene.ran(5.5, 8, "b", "w2")

    assert scene.violations() == []
    assert sorted(scene.explained()) == ["lapsed", "overlap"]


def test_a_body_may_begin_late_in_a_worker_that_was_stopped_after_the_gate(scene):
    scene.call(1, "a")
    scene.received(1.1, "a", "w1", "w1/a/5.9")
    scene.fault("worker stopped", 1.5, 5.8, "w1")
    scene.call(5, "b")
    scene.ran(5.5, 8, "b", "w2", token=9)
    scene.ran(5.9, 6.1, "a", "w1", token=8, still_mine=False)

    assert scene.violations() == []


@pytest.mark.parametrize(
    ("target", "until"), [("w2", 6.0), ("w1", 2.0)], ids=["another worker", "too short"]
)
def test_a_stop_that_could_not_end_the_lease_explains_nothing(scene, target, until):
    scene.call(1, "a")
    scene.ran(1.2, 7, "a", "w1")
    scene.fault("worker stopped", 1.5, until, target)
    scene.call(5, "b")
    scene.ran(5.5, 8, "b", "w2")

    assert scene.violations() == ["overlap"]


def test_a_killed_run_ends_with_its_process(scene):
    scene.call(1, "a")
    scene.ran(1.2, None, "a", pid=11)
    scene.fault("worker killed", 1.3, 1.4, "w1", pids=[10, 11])
    scene.call(5, "b")
    scene.ran(5.5, 6, "b", "w2")

    assert scene.violations() == []


def test_a_message_delivered_again_after_its_workers_death_may_run_beside_the_next():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a", "w1")
    scene.fault("worker killed", 1.41, 1.5, "w1", pids=[10])
    scene.call(1.6, "b")
    scene.ran(1.7, 6, "b", "w2")
    scene.ran(5, 7, "a", "w3")

    assert scene.violations() == []


def test_a_message_whose_body_was_cut_short_still_has_its_key():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, None, "a", "w1", pid=11)
    scene.fault("worker killed", 1.41, 1.5, "w1", pids=[10, 11])
    scene.call(1.6, "b")
    scene.ran(1.7, 6, "b", "w2")
    scene.ran(5, 7, "a", "w3")

    assert scene.violations() == ["overlap"]


# -- lapsed


def test_a_lease_that_lapsed_in_a_running_worker_is_found(scene):
    scene.call(1, "a")
    scene.lost(4, "a")
    scene.ran(1.2, 5, "a", still_mine=False)

    assert scene.violations() == ["lapsed", "lapsed"]


def test_a_lease_may_lapse_while_its_worker_cannot_reach_the_store(scene):
    scene.call(1, "a")
    scene.fault("connection cut", 1.3, 4.5, "w1", link="store", mode="stall")
    scene.ran(1.2, 5, "a", still_mine=False)

    assert scene.violations() == []


def test_a_lapse_that_is_noticed_at_the_end_is_that_of_the_run_that_ended():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.received(1.1, "a", "w1", "w1/a/5.1")
    scene.fault("worker stopped", 1.2, 5, "w1")
    scene.ran(5.1, 5.3, "a", still_mine=False)
    scene.ran(5.25, 5.4, "a", token=9)
    noticed = "its lock had lapsed or gone to another when it ended"
    scene.lost(5.31, "a", reason=noticed)
    assert scene.violations() == []

    scene.lost(5.41, "a", reason=noticed)

    assert scene.violations() == ["lapsed"]


def test_a_task_let_in_without_the_store_has_no_lock_of_its_own(scene):
    scene.call(1, "a")
    scene.received(1.1, "a", "w1")
    scene.lost(2, "a")
    scene.ran(6, 6.2, "a", "w2")
    assert scene.violations() == ["lapsed"]

    scene.fault("connection cut", 1.0, 1.3, "w1", link="store", mode="cut")
    scene._note("store_error", 1.2, id="a", worker="w1", pid=10, act="start")

    assert scene.violations() == []


def test_a_cut_from_the_broker_is_no_reason_to_lose_a_lease(scene):
    scene.call(1, "a")
    scene.fault("connection cut", 1.3, 4.5, "w1", link="broker", mode="stall")
    scene.ran(1.2, 5, "a", still_mine=False)

    assert scene.violations() == ["lapsed"]


# -- the store: its clock, its memory and its disk


def test_a_clock_that_jumps_past_a_lease_explains_two_at_once(scene):
    scene.call(1, "a")
    scene.ran(1.2, 4, "a", "w1", still_mine=False)
    scene.fault("clock jumped", 2, 3.5, ahead=4.0)
    scene.call(2.1, "b")
    scene.ran(2.3, 4.5, "b", "w2")

    assert scene.violations() == []
    assert sorted(scene.explained()) == ["lapsed", "overlap"]


@pytest.mark.parametrize(
    ("t", "ahead"),
    [(2, 1.0), (0.5, 4.0), (2.5, 4.0)],
    ids=["too short", "before the lease", "after the second began"],
)
def test_a_clock_that_jumped_otherwise_explains_nothing(t, ahead, scene):
    scene.fault("clock jumped", t, t + 1, ahead=ahead)
    scene.call(1, "a")
    scene.ran(1.2, 4, "a", "w1")
    scene.call(2.1, "b")
    scene.ran(2.3, 4.5, "b", "w2")

    assert scene.violations() == ["overlap"]


def test_a_retry_goes_on_without_the_lock_that_the_run_before_it_lost():
    scene = Scene(task="tests.chaos.app.late_retrying")
    scene.call(1, "a")
    scene.ran(1.2, 2, "a", outcome="retry")
    scene.ran(3, 4, "a", still_mine=False)
    assert scene.violations() == ["lapsed"]

    scene.fault("clock jumped", 1.5, 2.2, ahead=4.0)

    assert scene.violations() == []


def test_a_clock_that_is_set_back_brings_a_lapsed_lock_back_until_its_lease_ends(scene):
    scene.call(1, "a")
    scene.ran(1.2, 2, "a", still_mine=False)
    scene.fault("clock jumped", 1.5, 2.5, ahead=4.0)
    scene.call(4.4, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(4.6, "a", outcome="deduplicated")
    scene.call(6, "b")
    scene.ran(6.1, 6.3, "b")
    scene.call(8, "b", outcome="deduplicated")

    assert scene.violations() == ["swallowed", "swallowed"]


def test_a_clock_that_is_set_back_lets_no_lease_lapse(scene):
    scene.fault("clock jumped", 0.5, 2, ahead=4.0)
    scene.call(1, "a")
    scene.ran(1.2, 4, "a", still_mine=False)

    assert scene.violations() == ["lapsed"]


def test_a_message_waits_longer_than_its_lease_where_the_clock_jumps(scene):
    scene.call(1, "a")
    scene.fault("clock jumped", 9, 10, ahead=7.0)
    scene.call(16, "b")
    scene.ran(16.1, 17, "b", "w2")
    scene.ran(16.2, 17, "a", "w1")
    assert scene.violations() == []

    scene.call(18, "c")
    scene.call(24, "d")
    scene.ran(31.9, 33, "c", "w1")
    scene.ran(32, 33, "d", "w2")

    assert scene.violations() == ["overlap"]


def test_an_idempotency_key_is_kept_as_much_longer_as_the_clock_is_set_back():
    scene = Scene(task=KEYED)
    scene.fault("clock jumped", 0.5, 2, ahead=4.0)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.call(8, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(11, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


@pytest.mark.parametrize("kind", ["out of memory", "disk full"])
def test_a_store_that_refuses_to_write_lets_leases_lapse_that_could_not_be_renewed(kind, scene):
    scene.call(1, "a")
    scene.fault(kind, 1.3, 3.5)
    scene.ran(1.2, 5, "a", still_mine=False)
    assert scene.violations() == []

    scene.call(9, "b")
    scene.fault(kind, 10.3, 11)
    scene.ran(9.2, 13, "b", still_mine=False)

    assert scene.violations() == ["lapsed"]


@pytest.mark.parametrize("kind", ["out of memory", "disk full"])
def test_a_store_that_refuses_to_write_loses_nothing(kind):
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.fault(kind, 1.1, 1.6)
    scene.ran(1.2, 1.4, "a", "w1")
    scene.ran(6, 6.2, "a", "w2")
    scene.call(7, "b")

    assert scene.violations() == ["twice", "lost"]


@pytest.mark.parametrize("kind", ["out of memory", "disk full"])
def test_a_key_is_held_for_a_while_where_the_store_refused_to_free_it(kind, scene):
    scene.call(1, "a")
    scene.fault(kind, 1.1, 4)
    scene.ran(1.2, 1.4, "a")
    scene.call(6, "a", outcome="deduplicated")
    assert scene.violations() == []

    scene.call(16, "a", outcome="deduplicated")

    assert scene.violations() == ["swallowed"]


EVICTED = {"records": {"cu:{1}:k": "a", "cu:{2}:other": "x"}}


def test_an_evicted_record_explains_two_at_once(scene):
    scene.call(1, "a")
    scene.ran(1.2, 4, "a", "w1", still_mine=False)
    scene.fault("evicted", 2, 2.05, evicted=["cu:{1}:k"], **EVICTED)
    scene.call(2.1, "b")
    scene.ran(2.3, 4.5, "b", "w2")

    assert scene.violations() == []
    assert sorted(scene.explained()) == ["lapsed", "overlap"]


@pytest.mark.parametrize(
    ("t", "evicted"),
    [(2, ["cu:{2}:other"]), (2, []), (0.5, ["cu:{1}:k"]), (4.2, ["cu:{1}:k"])],
    ids=["another record", "none", "before the call", "afterwards"],
)
def test_an_eviction_that_did_not_drop_the_record_in_time_explains_nothing(t, evicted, scene):
    scene.call(1, "a")
    scene.ran(1.2, 4, "a", "w1", still_mine=False)
    scene.fault("evicted", t, t + 0.05, evicted=evicted, **EVICTED)
    scene.call(2.1, "b")
    scene.ran(2.3, 4.5, "b", "w2")

    assert scene.violations() == ["overlap", "lapsed"]


def test_an_eviction_loses_a_parked_call_and_no_message():
    scene = Scene(task=QUEUEING)
    scene.call(1, "a")
    scene.call(1.1, "b", outcome="queued")
    scene.ran(1.2, 4, "a", still_mine=False)
    scene.fault("evicted", 2, 2.05, evicted=["cu:{1}:k"], **EVICTED)
    assert scene.violations() == []
    assert scene.explained() == ["lost with record", "lapsed"]

    scene.call(1.3, "c")

    assert scene.violations() == ["lost"]


def test_an_eviction_loses_merged_values_and_not_those_in_the_message():
    scene = Scene(task=MERGING)
    scene.call(1, "a", value="1")
    scene.call(1.1, "a", outcome="merged", value="2")
    scene.fault("evicted", 2, 2.05, evicted=["cu:{1}:k"], **EVICTED)
    scene.ran(3, 4, "a", values=["1"])
    assert scene.violations() == []
    assert scene.explained() == ["lost with record"]

    scene.ran(5, 6, "b", values=["3"])
    scene.call(4.5, "b", value="4")

    assert scene.violations() == ["lost"]


def test_a_parked_call_without_an_eviction_is_lost():
    scene = Scene(task=QUEUEING)
    scene.call(1, "a", outcome="queued")

    assert scene.violations() == ["lost"]


def test_a_partition_explains_what_its_links_do_and_no_more(scene):
    scene.fault("partition", 1.3, 4.5, "w1", link="store", mode="stall_requests")
    scene.fault("partition", 1.3, 4.5, "w2", link="broker", mode="stall_replies, lost")
    scene.call(1, "a")
    scene.ran(1.2, 5, "a", "w1", still_mine=False)
    assert scene.violations() == []

    scene.ran(6, 6.1, "b", "w3")
    scene.call(5.9, "b")
    scene.call(1.1, "c")
    scene.ran(1.21, 1.22, "c", "w2", still_mine=False)

    assert "lapsed" in scene.violations()


def test_the_keys_of_a_bucket_lose_what_its_due_set_tells():
    records = {"cu:{1}:a": "x", "cu:{1}:b": "y", "cu:{2}:c": "z"}

    assert records_of("cu:{1}:a", records) == ["cu:{1}:a"]
    assert records_of("cu:{1}p:a", records) == ["cu:{1}:a"]
    assert records_of("cu:{1}due", records) == ["cu:{1}:a", "cu:{1}:b"]


@pytest.mark.parametrize(
    ("plan", "has", "lacks"),
    [
        (Plan("redis", 1), ["out of memory", "evicted"], ["clock jumped"]),
        (Plan("one redis", 1), ["partition"], ["out of memory", "evicted"]),
        (Plan("redis", 1, store="postgresql", clock=True), ["clock jumped"], ["evicted"]),
        (Plan("redis", 1, store="cluster", clock=True), ["slots moved"], ["clock jumped"]),
    ],
    ids=lambda value: f"{value.broker}-{value.store}" if isinstance(value, Plan) else "",
)
def test_a_run_has_the_faults_that_its_servers_can_have(plan, has, lacks):
    kinds = kinds_of(plan)

    assert kinds[0] == "none"
    assert {*has} <= {*kinds}
    assert not {*lacks} & {*kinds}


# -- twice, and left over


def test_a_task_that_ran_to_its_end_twice_is_found(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a", "w1")
    scene.ran(2, 2.2, "a", "w2")

    assert scene.violations() == ["twice"]


def test_a_lock_that_is_left_over_is_found(scene):
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a")
    scene.left(locks=1)

    assert scene.violations() == ["left"]


JOINS = ["celery/concurrency/prefork.py on_stop", "billiard/pool.py join"]


@pytest.mark.parametrize(
    "waits_in",
    [[], [JOINS[0]], [*JOINS, "process 7"], [*JOINS, "celery_unique/worker/ack.py acknowledge"]],
    ids=["unknown", "in Celery", "a process that is busy", "in a handler of the library"],
)
def test_a_worker_that_does_not_end_is_found(waits_in, scene):
    scene._note("stuck", 9, worker="w1", waits_in=waits_in)

    assert scene.violations() == ["stuck"]


def test_celery_may_wait_for_a_process_of_its_pool_that_waits_for_a_task(scene):
    scene._note("stuck", 9, worker="w1", waits_in=JOINS)

    assert scene.violations() == []
    assert scene.explained() == ["stuck"]


def test_a_shutdown_explains_nothing():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a", "w1")
    scene.fault("worker shut down", 1.41, 3, "w1")
    scene.ran(5, 7, "a", "w3")

    assert scene.violations() == ["twice"]


def test_a_body_that_ends_in_a_warm_shutdown_may_run_again_if_it_was_not_acknowledged():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.6, "a", "w1")
    scene.fault("worker shut down", 1.41, 3, "w1")
    scene.ran(5, 7, "a", "w3")
    assert scene.violations() == []
    assert scene.explained() == ["twice"]

    scene.ack(1.7, "a", "w1")

    assert scene.violations() == ["twice"]


def test_a_worker_with_threads_acknowledges_what_ends_in_a_warm_shutdown():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.6, "a", "w3")
    scene.fault("worker shut down", 1.41, 3, "w3")
    scene.ran(5, 7, "a", "w1")

    assert scene.violations() == ["twice"]


def test_messages_that_nobody_handled_are_found(scene):
    scene.left(messages=3)

    assert scene.violations() == ["unhandled"]


# -- the report, and the journal


def test_the_report_shows_the_history_of_the_key(scene):
    scene.call(1, "a")
    scene.call(1.1, "b")
    scene.ran(1.2, 2, "a", "w1")
    scene.ran(1.5, 2.5, "b", "w2")

    text = scene.report().text()

    assert f"VIOLATION (overlap) {EARLY}(1): two tasks at once: a on w1 and b on w2" in text
    assert "  -0.300 start" in text
    assert "FAILED: 1 violations" in text


def test_findings_are_counted_for_the_fault_of_their_time(scene):
    scene.call(1, "a")
    scene._note("episode", 2, fault="worker killed")
    scene.call(3, "b")

    report = scene.report()

    assert report.count("lost", explained=False, episode="none") == 1
    assert report.count("lost", explained=False, episode="worker killed") == 1
    assert report.count("lost", explained=False) == 2


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    journal = Journal(tmp_path, "w1")
    journal.note("start", id="a")
    [path] = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"t": 1, "what": "en')

    assert [event["what"] for event in read(tmp_path)] == ["start"]
