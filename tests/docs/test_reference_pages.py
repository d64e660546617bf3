"""The reference pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_unique import exceptions
from celery_unique.config.settings import DEFAULT_SETTINGS, SETTINGS
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.policy.fields import CONFLICT_STRATEGIES, DIMENSIONS, IDENTITY_STRATEGIES
from celery_unique.policy.option_names import CALL_ONLY, OPTION_FIELDS
from celery_unique.policy.states import GROUPS, STATES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one."""
    match = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^\(\w[\w-]*\)=\n|^#|\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert match, f"no section {heading}"
    return match[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_its_section(name):
    setting = SETTINGS[name]

    text = section(page("settings.md"), f"`{name}`")

    assert setting.meaning in text
    assert f"- **Default:** {setting.shown_default}." in text
    assert f"- **Change it when:** {setting.change_when}" in text
    assert "**What goes wrong otherwise:**" in text


def test_the_table_of_settings_is_complete_and_has_nothing_else():
    rows = re.findall(
        r"^\| \[`(unique_\w+)`\]\(#\w+\) \| (.*) \| (.*) \|$", page("settings.md"), re.MULTILINE
    )

    assert rows == [(name, s.shown_default, s.meaning) for name, s in SETTINGS.items()]


def test_every_default_for_an_option_is_listed():
    rows = re.findall(
        r"^\| `(unique_default_\w+)` \| \[`(\w+)`\]", page("settings.md"), re.MULTILINE
    )

    assert dict(rows) == DEFAULT_SETTINGS


@pytest.mark.parametrize("option", OPTION_FIELDS)
def test_every_option_has_its_section(option):
    field = OPTION_FIELDS[option]
    heading = f"`{option}`" if option == field else f"`{option}`, field `{field}`"

    text = section(page("policy.md"), heading)

    for part in ("- **Default:**", "- **Change it**", "- **What goes wrong otherwise:**"):
        assert part in text


def test_the_policy_page_has_every_name_that_can_be_written():
    text = page("policy.md")

    names = [*DIMENSIONS, *CONFLICT_STRATEGIES, *IDENTITY_STRATEGIES, *STATES, *GROUPS, *CALL_ONLY]

    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", exceptions.__all__)
def test_every_exception_is_on_its_page(name):
    cls = getattr(exceptions, name)
    text = page("exceptions.md")

    assert name in text
    if issubclass(cls, CeleryUniqueError) and cls is not CeleryUniqueError:
        section(text, f"`{name}`")
        row = re.search(rf"^\| \[`{name}`\].*\| `(\w+)` \| (yes|no) \|$", text, re.MULTILINE)
        assert row
        assert row.groups() == (cls.ojs_code, "yes" if cls.retryable else "no")
