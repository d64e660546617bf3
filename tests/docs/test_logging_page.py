"""The page of log lines has every line that the code can write, and their attributes."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from functools import cache
from pathlib import Path

import pytest

import celery_unique
from celery_unique import reporting as reports
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


@cache
def written_lines() -> list[tuple[str, str, str]]:
    """Module, level and text of every call of a logger."""
    found = []
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
def test_every_log_line_is_on_the_page_with_its_level(module: str, level: str, text: str) -> None:
    # The longest beginning that fits: "%s[%s]: %s" begins many others.
    beginnings = [row for row in rows() if text.startswith(row[1])]

    assert beginnings, f"{module} writes a line that docs/reference/logging.md does not have"
    assert max(beginnings, key=lambda row: len(row[1]))[0] == level


@pytest.mark.parametrize(("level", "text"), rows())
def test_every_line_on_the_page_can_be_written(level: str, text: str) -> None:
    lines = [(found, line) for _, found, line in written_lines() if line.startswith(text)]

    assert level in {found for found, _ in lines}


def test_the_attributes_on_the_page_are_those_of_the_code() -> None:
    source = inspect.getsource(reports)
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "facts"
    ]
    in_code = {keyword.arg for call in calls for keyword in call.keywords}
    outcomes = {arg.value for call in calls for arg in call.args[2:] if hasattr(arg, "value")}
    table = PAGE.split("These have no attributes")[0]

    assert {name for name in in_code if f"`{name}`" not in table} == set()
    assert {name for name in outcomes if f"`{name}`" not in table} == set()


def test_no_attribute_is_one_that_python_has_given_to_every_log_record() -> None:
    taken = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
    facts = reports.facts("a", "b", "c", key="", reason="", by="", act="", holder_state="")

    assert set(facts) & taken == set()
