"""No order of steps violates the protocol, and without any of its rules one does.

The model's store is the shipped one. ``make prove`` explores every scenario; ``make test`` the
short ones.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache

import pytest

from celery_unique.stores.memory import MemoryStore
from spec.protocol.actors import RULES, Protocol
from spec.protocol.explorer import Explored, TooManyStates, explore
from spec.protocol.invariants import INVARIANTS
from spec.protocol.scenarios import SCENARIOS, SHORT
from spec.protocol.summary import facts, summary
from tests.spec.rules_left_out import COUNTEREXAMPLES, NOT_NEEDED, broken_stores

PROVING = bool(os.environ.get("CELERY_UNIQUE_PROVE"))
EXPLORED = list(SCENARIOS) if PROVING else [name for name in SCENARIOS if name in SHORT]

#: Sentences of which no short scenario says anything, and one that does.
CHECKED_BY = {"lane": "bounded lane"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def model_without(rule: str, scenario: str) -> Protocol:
    if rule in RULES:
        return Protocol(SCENARIOS[scenario], without=rule)
    return Protocol(SCENARIOS[scenario], store_class=broken_stores()[rule])


def facts_of_rule(rule: str, explored: Explored) -> dict[str, object]:
    scenario, invariant = COUNTEREXAMPLES[rule]
    found = {"states": explored.states, "steps": len(explored.run)}
    return {"rule": rule, "scenario": scenario, "invariant": invariant, **found}


@cache
def all_orders(name: str) -> tuple[Protocol, Explored, float]:
    """The model of a scenario, what was explored of it, and for how long."""
    began = time.monotonic()
    model = Protocol(SCENARIOS[name])
    explored = explore(model)
    return model, explored, time.monotonic() - began


@pytest.mark.parametrize("name", EXPLORED)
def test_no_order_of_steps_violates_an_invariant(name, report, record_property):
    model, explored, took_s = all_orders(name)

    record_property("explored", facts(name, model, explored, took_s))
    report(
        f"{name}: {explored.states} states, {explored.steps} steps, {explored.ends} ends, "
        f"{len(model.store.acts)} kinds of act and reply, {took_s:.1f} s"
    )
    assert not explored.violation, explored.story()
    assert explored.ends > 0


@pytest.mark.parametrize("rule", COUNTEREXAMPLES)
def test_without_a_rule_some_order_violates_an_invariant(rule, report, record_property):
    scenario, invariant = COUNTEREXAMPLES[rule]

    explored = explore(model_without(rule, scenario))

    assert explored.violation.startswith(f"{invariant}:"), explored.violation
    record_property("rule", facts_of_rule(rule, explored))
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
        used |= {act.partition(":")[0] for act in all_orders(name)[0].store.acts}

    reading = {"read", "walk", "due", "mark", "followers", "parked", "payload"}
    life = {"sweep", "ping", "diagnose", "flush", "close", "fingerprint", "from_url"}
    several = {"acquire_many", "confirm_many"}
    acts = {name for name in dir(MemoryStore) if not name.startswith("_")}
    acts = {name for name in acts if callable(getattr(MemoryStore, name))}
    assert acts - reading - life - several - used == set()


def test_every_invariant_is_checked_in_some_state_where_nothing_suspends_it():
    checked = {sentence for name in SHORT for sentence in all_orders(name)[0].checked}
    missing = {*INVARIANTS} - checked

    assert not {*checked} - {*INVARIANTS}
    for sentence in missing:  # by a scenario that only make prove explores
        model = Protocol(SCENARIOS[CHECKED_BY[sentence]])
        explore(model)
        assert model.checked[sentence], sentence
    assert missing == {*CHECKED_BY}


def test_the_summary_counts_states_steps_acts_sentences_and_rules():
    model, explored, took_s = all_orders("one call")
    rule = "ConfirmActsOnAnyState"
    found = explore(model_without(rule, COUNTEREXAMPLES[rule][0]))

    shown = summary(
        [facts("one call", model, explored, took_s)] * 2,
        [facts_of_rule(rule, found)],
        {"give back": "it lapses"},
    )

    acquires, created = explored.labels["caller 0 acquires"], model.store.acts["acquire: created"]
    assert f"2 scenarios: {2 * explored.states:,} states, {2 * explored.steps:,} steps" in shown
    assert re.search(rf"\n  caller N acquires +{2 * acquires:,}\n", shown)
    assert re.search(rf"\n  acquire: created +{2 * created:,}\n", shown)
    assert re.search(rf"\n  nothing is lost +2 +{2 * explored.ends:,}\n", shown)
    assert re.search(r"\n  lane +0 +0\n", shown)
    assert f"\n  {rule}: live delivery, in 'one call', after {len(found.run)} steps" in shown
    assert shown.endswith("\n  give back: it lapses")


def test_a_scenario_that_is_too_large_is_not_taken_for_proven():
    with pytest.raises(TooManyStates):
        explore(Protocol(SCENARIOS["two calls"]), most=100)
