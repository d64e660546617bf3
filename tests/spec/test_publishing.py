"""No interleaving violates the protocol, and without any of its rules one does."""

from __future__ import annotations

import pytest

from spec.publishing import RULES, Call, Scenario, check

TWO = "two steps"


def faults(**numbers: int) -> tuple[tuple[str, int], ...]:
    names = {"no_reply": "time-out", "cut": "connection lost", "refused": "push refused"}
    names |= {"caller": "caller dies", "worker": "worker dies", "failed": "publish fails"}
    names |= {"receipt": "receipt lapses"}
    return tuple((names[name], number) for name, number in numbers.items())


SCENARIOS = {
    "two atomic calls": Scenario((Call(), Call()), faults=faults(caller=1, cut=1, worker=1)),
    "late ack": Scenario((Call(), Call()), late_ack=True, faults=faults(cut=1, worker=1)),
    "lost replies": Scenario((Call(),), faults=faults(cut=1, receipt=1, caller=1)),
    "push refused": Scenario((Call(), Call()), faults=faults(refused=1, cut=1, caller=1)),
    "time-out": Scenario((Call(), Call()), faults=faults(no_reply=1, cut=1, caller=1)),
    "time-out, called again": Scenario((Call(calls_again=True),), faults=faults(no_reply=1, cut=1)),
    "time-out, two callers": Scenario(
        (Call(calls_again=True), Call()), faults=faults(no_reply=1, worker=1)
    ),
    "published without reply": Scenario(
        (Call(on_error="publish"), Call()), faults=faults(no_reply=1, cut=1)
    ),
    "atomic replace": Scenario(
        (Call(), Call(strategy="replace")), faults=faults(no_reply=1, cut=1, caller=1)
    ),
    "two atomic replaces": Scenario(
        (Call(), Call(strategy="replace"), Call(strategy="replace")), faults=faults(cut=1)
    ),
    "two steps": Scenario((Call(TWO), Call(TWO)), faults=faults(caller=1, failed=1, worker=1)),
    "both ways": Scenario((Call(TWO), Call()), faults=faults(caller=1, failed=1, cut=1)),
    "both ways, time-out": Scenario((Call(TWO), Call()), faults=faults(caller=1, no_reply=1)),
    "two steps replace atomic": Scenario(
        (Call(), Call(TWO, "replace")), faults=faults(caller=1, failed=1)
    ),
    "atomic replaces two steps": Scenario(
        (Call(TWO), Call(strategy="replace")), faults=faults(caller=1, failed=1, no_reply=1)
    ),
}

#: A scenario in which the rule is needed, and what happens without it.
COUNTEREXAMPLES = {
    "receipt": ("lost replies", "0 ran 2 times"),
    "own record": ("lost replies", "0 has a message and no lock"),
    "push first": ("push refused", "0 has a lock and no message"),
    "withdraw refuses": ("time-out", "was withdrawn and runs"),
    "attempt": ("time-out, called again", "0 was accepted and is lost"),
    "withdraw its own": ("time-out, called again", "0 was accepted and is lost"),
    "withdraw duplicates": ("time-out", "which is lost"),
    "withdraw mark": ("time-out", "0 has a message and no lock"),
    "withdraw active": ("time-out", "two bodies of one key"),
    "keep replacement": ("atomic replace", "is lost"),
    "copies": ("published without reply", "0 ran 2 times"),
    "one delivery": ("both ways", "one task runs twice at a time"),
    "result with finish": ("two atomic calls", "can be read while 0 holds the key"),
    "help": ("two steps", "which is lost"),
    "help copies": ("both ways", "which is lost"),
    "give_back mark": ("two steps", "two bodies of one key"),
    "limbo": ("two steps replace atomic", "is lost"),
    "confirm pending": ("two steps", "the key stays held"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_violates_an_invariant(name):
    checked = check(SCENARIOS[name])

    print(f"{name}: {checked.states} states")
    assert checked.violation == "", "\n".join(checked.run)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_an_invariant_is_violated(rule):
    name, violation = COUNTEREXAMPLES[rule]

    checked = check(SCENARIOS[name], without=rule)

    assert violation in checked.violation, checked
    print(f"without {rule!r} ({checked.states} states): {checked.violation}")
    print("\n".join(f"  {step}" for step in checked.run))
