"""Records that are frozen for the type checker only."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from celery_unique.values import value

CHANGES = """
from celery_unique.values import value

@value
class Facts:
    outcome: str = ""

Facts("created").outcome = "bypassed"
"""


@value
class Facts:
    outcome: str = ""
    numbers: tuple[int, ...] = ()


def test_records_with_equal_values_are_equal_and_are_changed_by_copying() -> None:
    facts = Facts("created", (1,))

    assert facts == Facts("created", (1,))
    assert replace(facts, numbers=()) == Facts("created")
    assert repr(facts) == "Facts(outcome='created', numbers=(1,))"


def test_a_record_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Facts().outcomes = "created"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_type_checker_refuses_to_change_a_record(tmp_path: Path) -> None:
    (tmp_path / "changes.py").write_text(CHANGES)

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 'Property "outcome" defined in "Facts" is read-only' in done.stdout
