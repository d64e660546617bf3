"""What can be used is documented, and what is documented can be used."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import celery_unique
from celery_unique import reporting as signals
from celery_unique.config import settings
from celery_unique.operations.doctor import checks, failovers
from celery_unique.operations.doctor import followers as followed
from celery_unique.operations.doctor import report as doctor
from celery_unique.policy.option_names import CALL_ONLY, TASK_OPTIONS
from celery_unique.publish.results import OUTCOMES
from celery_unique.stores import BUILT_IN
from celery_unique.stores.redis import diagnosis as redis_diagnosis
from celery_unique.stores.sql import diagnosis as sql_diagnosis
from tests.docs.pages import DOCS

REFERENCE = DOCS / "reference"


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def whole_reference() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))


@pytest.mark.parametrize("name", celery_unique.__all__)
def test_every_public_name_is_in_the_reference(name):
    assert re.search(rf"`{name}\b", whole_reference())


@pytest.mark.parametrize("name", [*settings.SETTINGS, *settings.DEFAULT_SETTINGS])
def test_every_setting_is_in_the_reference(name):
    assert f"`{name}`" in page("settings.md")


@pytest.mark.parametrize("name", sorted(TASK_OPTIONS | CALL_ONLY))
def test_every_option_is_in_the_reference(name):
    assert f"`{name}`" in page("policy.md")


def test_no_page_names_a_setting_or_option_that_is_not_there():
    known = {
        *settings.SETTINGS,
        *settings.DEFAULT_SETTINGS,
        *TASK_OPTIONS,
        *CALL_ONLY,
        *celery_unique.__all__,
        "unique_key",
        "unique_key_secret",
    }
    # Shown on purpose as what nothing reads, and columns and attributes of other names.
    others = {"unique_stor_url", "unique_default_", "unique_held", "unique_jobs"}
    heimdalls = {f"unique_{name}" for name in ("timeout", "raises", "wait_for_expiry")}
    heimdalls |= {"unique_lock_blocking", "unique_lock_timeout"}
    others |= {"unique_app", "unique_locks"}  # fixtures of celery_unique.testing
    for path in DOCS.rglob("*.md"):
        if DOCS / "_build" in path.parents:
            continue
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w.])unique_[a-z_]+(?!\w|::|\.py)", text))
        allowed = others | heimdalls if path.name == "migrate.md" else others
        assert named - known - allowed == set(), path


def test_the_names_in_all_are_sorted_and_there():
    assert celery_unique.__all__ == sorted(celery_unique.__all__)
    assert [name for name in celery_unique.__all__ if not hasattr(celery_unique, name)] == []


@pytest.mark.parametrize(
    "name", ["apply_many", "install", "lookup", "manifest", "release", "time_bucket"]
)
def test_the_signature_on_the_page_is_the_functions(name):
    parameters = inspect.signature(getattr(celery_unique, name)).parameters.values()

    shown = re.search(rf"^{name}\((.*)\) ->", page("functions.md"), re.MULTILINE)

    assert shown
    bare = [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]
    keyword_only = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    if any(keyword_only):
        bare.insert(keyword_only.index(True), "*")
    assert shown[1].split(", ") == bare


def test_every_field_of_a_lock_is_on_its_page():
    section = page("functions.md").split("## `Lock`")[1].split("\n## ")[0]

    assert set(re.findall(r"`([a-z_]+)`", section.split("| --- |")[1])) >= {
        field.name for field in fields(celery_unique.Lock)
    }


def test_every_outcome_is_on_the_page_of_results():
    assert [name for name in OUTCOMES if f"`{name}`" not in page("results.md")] == []


def test_the_glossary_names_every_outcome_and_is_in_order():
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.*) \|$", page("glossary.md"), re.MULTILINE)
    words = [word for word, _ in rows]

    assert words == sorted(words)
    assert set(re.findall(r"`(\w+)`", dict(rows)["outcome"])) == set(OUTCOMES)


def test_every_command_and_option_of_the_command_line_is_on_its_page():
    import click

    from celery_unique.cli import unique

    text = page("cli.md")
    context = click.Context(unique)
    for name in unique.list_commands(context):
        assert f"\n## {name}\n" in text
        command = unique.get_command(context, name)
        assert command is not None
        options = [option for one in command.params for option in one.opts if option[0] == "-"]
        assert [
            option for option in options if f"`{option}" not in text and f" {option} " not in text
        ] == []


def test_every_check_of_the_doctor_is_on_its_page():
    modules = (checks, doctor, failovers, followed, redis_diagnosis, sql_diagnosis)
    source = "".join(inspect.getsource(module) for module in modules)
    named = set(re.findall(r"Finding\(\s*\"([a-z-]+)\"", source))

    assert len(named) > 10
    rows = page("cli.md").split("## doctor")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", rows, re.MULTILINE)) == named


@pytest.mark.parametrize("name", ["stores.md", "settings.md"])
@pytest.mark.parametrize("scheme", BUILT_IN)
def test_every_store_is_on_the_pages_of_stores_and_settings(scheme, name):
    assert re.search(rf"`{re.escape(scheme)}(\+\w+)?://", page(name))


@pytest.mark.parametrize(
    "signal", [name for name in celery_unique.__all__ if name.startswith("unique_")]
)
def test_the_facts_of_a_signal_are_those_on_its_page(signal):
    """The code's own list is the comment above each signal."""
    source = inspect.getsource(signals)
    comment = re.search(rf"((?:#: .*\n)+){signal} = ", source)
    assert comment
    in_code = set(re.findall(r"\b(\w+)\b", " ".join(re.findall(r"``([^`]+)``", comment[1]))))

    row = re.search(rf"^\| `{signal}` \|.*\|(.*)\|$", page("signals.md"), re.MULTILINE)

    assert row
    assert set(re.findall(r"`(\w+)`", row[1])) - {"completed", "discarded", "cancelled"} == in_code
