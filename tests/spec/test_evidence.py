"""The page on the evidence says what the specification has."""

from __future__ import annotations

import re

from spec.mutants.run import ROOT, mutants
from spec.protocol.invariants import as_table
from spec.protocol.scenarios import SCENARIOS, SHORT
from tests.chaos.evidence import MARKED, filled, read_history
from tests.spec.rules_left_out import COUNTEREXAMPLES, NOT_NEEDED
from tests.spec.test_publishing import SCENARIOS as PUBLISHING

PAGE = (ROOT / "docs" / "explanation" / "evidence.md").read_text(encoding="utf-8")
README = (ROOT / "spec" / "README.md").read_text(encoding="utf-8")


def test_the_page_has_every_invariant():
    found = re.search(r"(?s)<!-- invariants -->\n(.*?)\n<!-- end", PAGE)

    assert found is not None
    assert found[1] == as_table()


def test_the_numbers_of_scenarios_and_mutants_are_right():
    assert f", {len(SCENARIOS)} scenarios with callers" in PAGE
    assert f"| {len(SHORT)} scenarios |" in PAGE
    assert f"`spec/publishing.py`, {len(PUBLISHING)} scenarios" in PAGE
    assert f"has {len(mutants())} patches" in PAGE
    assert f"for {len(SCENARIOS)} scenarios of one key" in README
    assert f"every order of {len(PUBLISHING)} scenarios" in README
    assert f"{len(mutants())} patches" in README


def test_the_numbers_of_rules_are_right():
    caught, others = len(COUNTEREXAMPLES), len(NOT_NEEDED)

    said = f"Without {caught} of the {caught + others} rules a sentence is violated; without the"
    assert f"{said} other {others} none is." in PAGE


def test_there_are_scenarios_of_everything_that_the_protocol_has():
    assert {*SHORT} <= {*SCENARIOS}
    assert len(SCENARIOS) + len(PUBLISHING) >= 60
    calls = [call for scenario in SCENARIOS.values() for call in scenario.calls]
    strategies = {call.strategy for call in calls}
    replacing = {"replace", "replace_except_schedule"}
    assert strategies == {"ignore", "reject", "rerun", "queue", "merge"} | replacing
    assert {call.limit for call in calls} == {1, 2}
    assert {call.way for call in calls} == {"two steps", "atomic", "guard"}
    assert any(call.delay for call in calls)
    assert any(call.joins for call in calls)
    assert any(scenario.reapers == 2 for scenario in SCENARIOS.values())


def test_the_rates_are_those_of_the_history():
    history = read_history()

    assert MARKED.search(PAGE) is not None
    assert filled(PAGE, history) == PAGE
    assert history
    assert filled(PAGE, history[:-1]) != PAGE
