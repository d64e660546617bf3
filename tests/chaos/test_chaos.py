"""A short chaos run on each broker; and that the checker, which passes it, can fail."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.journal import Event, Journal, read
from tests.chaos.report import Report
from tests.chaos.run import run
from tests.chaos.stage import Plan

EARLY = "tests.chaos.app.early"
LATE = "tests.chaos.app.late"


# -- the real thing ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(240)
@pytest.mark.parametrize("broker", ["redis", "one redis", "rabbitmq"])
def test_nothing_is_lost_doubled_or_stuck_under_faults(broker, tmp_path):
    plan = Plan(broker=broker, seed=time.time_ns() % 10_000)

    report = run(plan, tmp_path, seconds=0, episode_s=2)

    print(report.text())
    assert report.passed, report.text()
    assert len(report.story.runs) > 50
    assert {fault.kind for fault in report.story.faults} >= {
        "worker killed",
        "pool child killed",
        "worker shut down",
        "worker stopped",
        "producer killed",
        "store restarted",
        "connection cut",
    }


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("broken", "finding"), [("acquire", "overlap"), ("renew", "lapsed")])
def test_a_broken_store_is_found_out(broken, finding, tmp_path):
    plan = Plan(
        broker="redis", seed=1, broken=broken, long_bodies=0.25, keys=2, calls_per_s=4, producers=2
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
        self._note("settings", 0, broker=broker, clock_offset=0, **_LEASES)
        self._note("episode", 0, fault="none")

    def _note(self, what: str, t: float, **facts: Any) -> None:
        self.events.append({"t": t, "what": what, **facts})

    def call(
        self, t: float, task_id: str, *, outcome: str = "created", returned: float | None = None
    ) -> None:
        self._calls += 1
        facts = {"call": f"p1/1/{self._calls}", "pid": 1, **self._key}
        self._note("call", t, **facts)
        if outcome == "created":
            self._note("published", t + 0.01, id=task_id, role="p1", pid=1)
        self._note("called", returned or t + 0.02, id=task_id, outcome=outcome, **facts)

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
    ) -> None:
        run = {"id": task_id, "worker": worker, "pid": pid, "token": token, "retries": 0}
        run |= {"delivery": f"{worker}/{task_id}/{start}", **self._key}
        self.received(start - 0.01, task_id, worker, run["delivery"])
        self._note("start", start, **run)
        if end is not None:
            self._note("end", end, outcome=outcome, still_mine=still_mine, **run)

    def lost(self, t: float, task_id: str, worker: str = "w1") -> None:
        reason = "its lock lapsed while it was running"
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


# -- swallowed


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


def test_a_worker_that_does_not_end_is_found(scene):
    scene._note("stuck", 9, worker="w1")

    assert scene.violations() == ["stuck"]


def test_a_shutdown_explains_nothing():
    scene = Scene(task=LATE)
    scene.call(1, "a")
    scene.ran(1.2, 1.4, "a", "w1")
    scene.fault("worker shut down", 1.41, 3, "w1")
    scene.ran(5, 7, "a", "w3")

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
