"""Every planted bug still applies to the code, and changes what it says.

``make mutants`` plants each of them and runs the checks until one finds it.
"""

from __future__ import annotations

import re
import shutil

import pytest

from spec.mutants.run import CHECKS, ROOT, Mutant, apply, mutants, table

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


def test_the_table_says_which_mutants_were_not_found():
    [first, second] = MUTANTS[:2]

    shown = table([(first, "contract", 3.2), (second, "", 60.0)])

    assert f"| `{first.name}` | {first.about} | contract | 3 s |" in shown
    assert f"| `{second.name}` | {second.about} | **not found** | 60 s |" in shown
