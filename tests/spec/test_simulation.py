"""Real callers and workers in the simulation: no seed violates the protocol, each replays exactly,
and mistakes that are planted are found.

``make simulate SEEDS=10000`` tries more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from celery_unique.stores.memory import MemoryStore
from spec.mutants.run import ROOT
from spec.protocol.invariants import INVARIANTS
from spec.simulation import run
from spec.simulation.checker import CHECKED, OF_A_RECORD, SUSPENDED_BY, violation
from spec.simulation.environment import patched
from spec.simulation.plan import FAULTS, OPERATOR, Call, Plan, plan_of
from spec.simulation.shrink import shrink, size, story
from spec.simulation.simulation import Trace, simulate
from tests.spec.planted_mistakes import planted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(int(os.environ.get("CELERY_UNIQUE_SEEDS", "200")))
#: The mistake, and the first of the seeds that are tried: those before it take long, and find none.
FOUND = {
    "confirms_before_publish": 50,
    "names_a_pending_holder": 50,
    "keeps_the_lock": 0,
    "withdraws_what_it_publishes": 200,
    "settles_before_the_acknowledgement": 200,
    "runs_what_waits": 0,
    "runs_what_is_superseded": 0,
    "renews_nothing": 0,
    "finishes_after_the_result": 100,
    "reaps_nothing": 300,
    "releases_at_a_retry": 0,
    "completes_before_the_result": 0,
    "DropsFollowersAtFinish": 0,
    "ConfirmCreates": 50,
    "RenewCreates": 0,
    "StartsBesideALivingDelivery": 0,
    "LeavesNoSupersededMark": 0,
    "ForgetsTheMarkOfCopies": 200,
    "SuccessorsDoNotWait": 0,
}
#: How many seeds a mistake may survive.
ENOUGH = 300


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    with patched():
        yield


def first_violation(seeds: range, store_class: type[MemoryStore] = MemoryStore) -> Trace | None:
    traces = (simulate(plan_of(seed), store_class=store_class) for seed in seeds)
    return next((trace for trace in traces if violation(trace)), None)


def test_no_seed_violates_the_protocol_and_each_replays_exactly(report):
    began = time.monotonic()

    found = run.explore(SEEDS)

    report(run.table(found, time.monotonic() - began))
    assert not found.violations, f"make simulate SEED={next(iter(found.violations))} shows it"
    assert not found.differing
    assert len(found.schedules) > len(SEEDS) * 0.9
    assert found.faults.keys() <= {*FAULTS, *OPERATOR}


def test_a_seed_is_the_same_in_another_process_whatever_its_hashes():
    code = (
        "from spec.simulation import run, plan, simulation, environment\n"
        "with environment.patched():\n"
        "    for seed in range(20, 26):\n"
        "        print(run.digest(simulation.simulate(plan.plan_of(seed))).hex())\n"
    )

    def digests(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=ROOT, env=env, check=True, capture_output=True, text=True
        ).stdout

    assert len(set(digests("1").split())) == 6
    assert digests("1") == digests("2")


def test_decisions_replay_the_run_that_they_were_made_in():
    for seed in range(5):
        trace = simulate(plan_of(seed))

        again = simulate(trace.plan, trace.decisions)

        assert again.text() == trace.text()


def test_every_fault_is_known_to_the_checker():
    assert {*SUSPENDED_BY} == {*FAULTS, "operator releases", "operator revokes"}
    assert {name for names in SUSPENDED_BY.values() for name in names} <= {*CHECKED}
    assert {*INVARIANTS} - {*CHECKED} == {*OF_A_RECORD}


@pytest.mark.parametrize("mistake", FOUND)
def test_a_planted_mistake_is_found(mistake, report):
    with planted(mistake) as store_class:
        trace = first_violation(range(FOUND[mistake], FOUND[mistake] + ENOUGH), store_class)

    assert trace is not None
    report(f"{mistake}: seed {trace.plan.seed}, {violation(trace)}")


def test_a_violation_shrinks_to_a_schedule_that_still_fails():
    with planted("runs_what_is_superseded") as store_class:
        trace = first_violation(range(200), store_class)
        assert trace is not None

        shrunk = shrink(trace, lambda plan, made: simulate(plan, made, store_class))
        again = simulate(shrunk.trace.plan, shrunk.trace.decisions, store_class)

    assert violation(again) == shrunk.violation
    assert shrunk.violation.partition(":")[0] == violation(trace).partition(":")[0]
    assert size(shrunk.trace) <= size(trace)
    assert len(shrunk.trace.decisions) <= len(trace.decisions)
    assert story(shrunk).startswith(f"{shrunk.violation}, after:\n  1. ")


def test_a_minimal_schedule_needs_each_of_its_decisions():
    with planted("confirms_before_publish") as store_class:
        trace = first_violation(range(50, 350), store_class)
        assert trace is not None
        shrunk = shrink(trace, lambda plan, made: simulate(plan, made, store_class))
        name = shrunk.violation.partition(":")[0]

        for key in shrunk.trace.decisions:
            rest = {k: v for k, v in shrunk.trace.decisions.items() if k != key}
            without = violation(simulate(shrunk.trace.plan, rest, store_class))
            assert without.partition(":")[0] != name


def test_two_calls_without_faults_run_once():
    trace = simulate(Plan(1, calls=[Call(0.0, 0), Call(0.0, 1)]), {})

    assert not violation(trace)
    assert [event.facts["how"] for event in trace.events if event.kind == "body ends"] == [
        "returns"
    ]


def test_the_command_explores_and_replays(capsys):
    assert run.main(["--seed", "3"]) == 0
    assert "seed 3: no violation" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        run.main(["--help"])
    assert ended.value.code == 0
