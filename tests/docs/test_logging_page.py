"""The page of log lines has every line that the code can write, and their attributes."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import celery_unique
from celery_unique import reporting
from tests.docs.pages import DOCS

PAGE = (DOCS / "reference" / "logging.md").read_text(encoding="utf-8")
PACKAGE = Path(celery_unique.__file__).parent
LEVELS = {
    "debug": "DEBUG",
    "info": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
}


EVENTS = [each for each in vars(reporting).values() if isinstance(each, reporting.Event)]


def line_of(event: reporting.Event) -> str:
    """The text as the page shows it: without the names of the facts."""
    return re.sub(r"%\(\w+\)[sd]", "%s", event.text)


@cache
def written_lines() -> list[tuple[str, str, str]]:
    """Module, level and text of every event, and of every other call of a logger."""
    found = [("reporting.py", logging.getLevelName(each.level), line_of(each)) for each in EVENTS]
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "logger"
                and node.func.attr in LEVELS
            ):
                text = ast.literal_eval(node.args[0])
                found.append((path.name, LEVELS[node.func.attr], text))
    return found


def rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| ([A-Z]+) \| `([^`]+)` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("module", "level", "text"), written_lines())
def test_every_log_line_is_on_the_page_with_its_level(module, level, text):
    # The longest beginning that fits: "%s[%s]: %s" begins many others.
    beginnings = [row for row in rows() if text.startswith(row[1])]

    assert beginnings, f"{module} writes a line that docs/reference/logging.md does not have"
    assert max(beginnings, key=lambda row: len(row[1]))[0] == level


@pytest.mark.parametrize(("level", "text"), rows())
def test_every_line_on_the_page_can_be_written(level, text):
    lines = [(found, line) for _, found, line in written_lines() if line.startswith(text)]

    assert level in {found for found, _ in lines}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.outcome)
def test_the_outcome_and_the_attributes_of_an_event_are_in_its_row(event):
    line = line_of(event)
    table = PAGE.split("These have no attributes")[0]
    found = re.findall(r"^\| [A-Z]+ \| `([^`]+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    [(outcomes, attributes)] = [row[1:] for row in found if line.startswith(row[0])]

    assert f"`{event.outcome}`" in outcomes
    assert re.findall(r"`(\w+)`", attributes) == list(event.facts)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.outcome)
def test_a_line_shows_no_fact_that_is_not_an_attribute(event):
    shown = set(re.findall(r"%\((\w+)\)", event.text))

    assert shown <= {"task_name", "task_id", *event.facts}
    assert event.level == logging.DEBUG or "key" not in event.facts


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.outcome)
def test_no_attribute_is_one_that_python_has_given_to_every_log_record(event):
    taken = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    assert {"task_name", "task_id", "outcome", *event.facts} & taken == set()


def reports_in(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each ``reporting.EVENT(...)`` of a module: the event, and the names of the facts it gets."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "reporting"
        ):
            yield node.func.attr, {keyword.arg or "**" for keyword in node.keywords}


def test_every_report_has_the_facts_of_its_event():
    of_signal = {
        reporting.unique_acquired: {"key", "app"},
        reporting.unique_released: {"key", "reason", "app"},
        reporting.unique_superseded: {"key", "by", "app"},
        reporting.unique_lost: {"key", "reason", "app"},
    }
    wrong = []
    checked = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, given in reports_in(path):
            event = getattr(reporting, name)
            if isinstance(event, reporting.Event):
                needed = {*event.facts} | (of_signal[event.signal] if event.signal else set())
                checked += 1
                if given - {"outcome"} != needed:
                    wrong.append((path.name, name, given ^ needed))

    assert checked >= 20
    assert wrong == []
