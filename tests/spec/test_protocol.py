"""No order of steps violates the protocol, and without any of its rules one does.

The model's store is the shipped one. ``make prove`` explores every scenario; ``make test`` the
short ones.
"""

from __future__ import annotations

import os
import time
from functools import cache

import pytest

from celery_unique.stores.memory import MemoryStore
from spec.protocol.actors import RULES, Protocol
from spec.protocol.explorer import Explored, TooManyStates, explore
from spec.protocol.invariants import INVARIANTS
from spec.protocol.scenarios import SCENARIOS, SHORT
from tests.spec.rules_left_out import COUNTEREXAMPLES, NOT_NEEDED, broken_stores

PROVING = bool(os.environ.get("CELERY_UNIQUE_PROVE"))
EXPLORED = list(SCENARIOS) if PROVING else [name for name in SCENARIOS if name in SHORT]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def model_without(rule: str, scenario: str) -> Protocol:
    if rule in RULES:
        return Protocol(SCENARIOS[scenario], without=rule)
    return Protocol(SCENARIOS[scenario], store_class=broken_stores()[rule])


@cache
def all_orders(name: str) -> tuple[set[str], Explored, float]:
    """The kinds of act and reply in a scenario, what was explored, and for how long."""
    began = time.monotonic()
    model = Protocol(SCENARIOS[name])
    explored = explore(model)
    return model.store.acts, explored, time.monotonic() - began


@pytest.mark.parametrize("name", EXPLORED)
def test_no_order_of_steps_violates_an_invariant(name, report):
    acts, explored, took_s = all_orders(name)

    report(
        f"{name}: {explored.states} states, {explored.steps} steps, {explored.ends} ends, "
        f"{len(acts)} kinds of act and reply, {took_s:.1f} s"
    )
    assert not explored.violation, explored.story()
    assert explored.ends > 0


@pytest.mark.parametrize("rule", COUNTEREXAMPLES)
def test_without_a_rule_some_order_violates_an_invariant(rule, report):
    scenario, invariant = COUNTEREXAMPLES[rule]

    explored = explore(model_without(rule, scenario))

    assert explored.violation.startswith(f"{invariant}:"), explored.violation
    if PROVING:
        report(f"without {rule!r} in {scenario!r} ({explored.states} states): {explored.story()}")


def test_every_rule_has_a_counterexample_or_a_reason_why_it_has_none():
    rules = {*RULES, *broken_stores()}

    assert rules == {*COUNTEREXAMPLES, *NOT_NEEDED}
    assert not {*COUNTEREXAMPLES} & {*NOT_NEEDED}
    assert {invariant for _, invariant in COUNTEREXAMPLES.values()} <= {*INVARIANTS}


def test_the_scenarios_use_every_act_of_a_store():
    used: set[str] = set()
    for name in SHORT:
        used |= {act.partition(":")[0] for act in all_orders(name)[0]}

    reading = {"read", "walk", "due", "mark", "followers", "parked", "payload"}
    life = {"sweep", "ping", "diagnose", "flush", "close", "fingerprint", "from_url"}
    several = {"acquire_many", "confirm_many"}
    acts = {name for name in dir(MemoryStore) if not name.startswith("_")}
    acts = {name for name in acts if callable(getattr(MemoryStore, name))}
    assert acts - reading - life - several - used == set()


def test_a_scenario_that_is_too_large_is_not_taken_for_proven():
    with pytest.raises(TooManyStates):
        explore(Protocol(SCENARIOS["two calls"]), most=100)
