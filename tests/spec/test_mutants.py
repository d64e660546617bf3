"""Every planted bug still applies to the code, and changes what it says.

``make mutants`` plants each of them and runs the checks until one finds it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec.mutants import run
from spec.mutants.run import (
    CHECKS,
    LONGEST_S,
    ROOT,
    Mutant,
    apply,
    caught_by,
    ended,
    mutants,
    table,
)

MUTANTS = mutants()


def test_there_are_mutants_of_every_part():
    assert len(MUTANTS) >= 40
    assert {mutant.part for mutant in MUTANTS} == {*CHECKS}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies(mutant, tmp_path):
    shutil.copytree(ROOT / "celery_unique", tmp_path / "celery_unique")

    assert apply(mutant, tmp_path) == ""


def test_a_mutant_that_does_not_apply_is_reported(tmp_path):
    patch = MUTANTS[0].path.read_text(encoding="utf-8")
    patch = re.sub(r"(?m)^-(?!--)", "-no such line ", patch)
    wrong = tmp_path / "01-lua-wrong.patch"
    wrong.write_text(patch, encoding="utf-8")

    assert "patch does not apply" in apply(Mutant(wrong), ROOT, check=True)


def test_the_checks_of_the_specification_and_chaos_come_before_other_tests():
    first = {"model", "simulation", "linearizability", "chaos"}

    for checks in CHECKS.values():
        names = [check for check, _ in checks]
        others = [name for name in names if name not in first]
        assert "chaos" in names
        assert names[len(names) - len(others) :] == others


def test_a_check_that_takes_too_long_has_not_found_the_mutant(monkeypatch, tmp_path):
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(run.subprocess, "run", hang)

    assert ended("model", "tests/spec", tmp_path, 0.1) == "timed out"


def test_the_checks_of_a_mutant_share_its_time(monkeypatch):
    now, given = [0.0], []

    def pass_late(check: str, arguments: str, root: Path, longest_s: float) -> str:
        given.append(longest_s)
        now[0] += 400
        return "passed"

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(run, "copied", lambda mutant: nullcontext(ROOT))
    monkeypatch.setattr(run, "ended", pass_late)

    assert caught_by(MUTANTS[0]) == ("", 800.0)
    assert given == [LONGEST_S, LONGEST_S - 400]


def test_the_table_says_which_mutants_were_not_found():
    [first, second] = MUTANTS[:2]

    shown = table([(first, "contract", 3.2), (second, "", 60.0)])

    assert f"| `{first.name}` | {first.about} | contract | 3 s |" in shown
    assert f"| `{second.name}` | {second.about} | **not found** | 60 s |" in shown
