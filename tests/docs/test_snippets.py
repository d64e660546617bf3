"""The Python on the pages runs, and the commands on them exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from celery_unique.cli import _COMMANDS as COMMANDS
from tests.docs import run_page
from tests.docs.pages import (
    DOCS,
    README,
    ROOT,
    all_pages,
    blocks,
    name_of,
    python_script,
)

#: Typed into a shell with a worker beside it: tests/docs/test_tutorial.py does that.
TUTORIAL = DOCS / "tutorial.md"
#: Typed to the letter by tests/workers/test_first_steps.py.
TYPED = DOCS / "start"
PAGES = [page for page in all_pages() if python_script(page).strip() and page != TUTORIAL]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_on_a_page_runs_as_one_script(page, tmp_path):
    done = subprocess.run(
        [sys.executable, run_page.__file__, page],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr


def test_every_page_that_should_show_code_does():
    names = {name_of(page) for page in PAGES}

    assert {"README.md", "docs/index.md", "docs/reference/functions.md"} <= names
    procedures = {"index", "deploy", "upgrade"}  # without code of their own
    how_to = {name_of(p) for p in (DOCS / "howto").glob("*.md") if p.stem not in procedures}
    assert how_to <= names


def test_a_snippet_that_is_wrong_fails_with_the_line_of_its_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\nText.\n\n```python\nassert x == 2\n```\n")

    done = subprocess.run(
        [sys.executable, run_page.__file__, page],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert f'File "{page}", line 10' in done.stderr


def test_the_readme_begins_with_an_example_of_nine_lines():
    first = next(block for block in blocks(README) if block.language == "python")

    assert len(first.text.splitlines()) == 9
    assert first.line < 20, "the example belongs on the first screen"


def test_the_readme_stays_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def make_variables() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))


def shell_lines() -> list[tuple[str, str]]:
    return [
        (name_of(page), line)
        for page in [*all_pages(), ROOT / "CONTRIBUTING.md"]
        if page.parent != TYPED
        for block in blocks(page)
        if block.language in ("bash", "console", "sh")
        for line in block.text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_a_command_on_a_page_exists(page, line):
    for command in line.partition(" #")[0].split("&&"):
        name, *arguments = shlex.split(command.strip())
        name = Path(name).name
        if name == "make":
            variables = {each.partition("=")[0] for each in arguments if "=" in each}
            assert {each for each in arguments if "=" not in each} <= make_targets(), line
            assert variables <= make_variables(), line
        elif name == "pip":
            assert_installs(arguments)
        elif arguments[:2] == ["manage.py", "celery_unique"]:
            assert arguments[2] in COMMANDS, line
        else:
            assert name in ("celery", "cd", "mkdir", "python3", "ssh"), (
                f"{page}: say how to check {line}"
            )


def assert_installs(arguments: list[str]) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments[0] == "install"
    for requirement in arguments[1:]:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", requirement)
        assert match, requirement
        if match[1] != project["name"]:  # the tests use it, too
            extras = project["optional-dependencies"].values()
            used = {re.match(r"[\w-]+", name)[0] for extra in extras for name in extra}
            assert match[1] in used, requirement
            continue
        assert set((match[2] or "").split(",")) - {""} <= set(project["optional-dependencies"])


def test_the_table_of_commands_has_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # Parts of others: the page of the matrix, the figures of a benchmark, and servers.
    parts = {"help", "matrix-docs", "bench-docs", "services"}

    assert {"test", "test-start", "mutants"} <= targets
    assert set(re.findall(r"^\| `make ([a-z-]+)` \|", text, re.MULTILINE)) == targets - parts


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_make_commands_in_the_text_exist(page):
    mentioned = set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")))

    assert mentioned <= make_targets()


def test_an_extra_is_quoted_wherever_it_is_named():
    """Brackets are a pattern in zsh, which finds no file of that name and installs nothing."""
    texts = [*all_pages(), *ROOT.glob("*.md"), *(ROOT / "example_project").glob("*.md")]
    texts += [*(ROOT / "celery_unique").rglob("*.py"), *(ROOT / "demo").rglob("*.py")]
    unquoted = [
        f"{name_of(path)}: {line.strip()}"
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r'(?<!")celery-unique-tasks\[', line)
    ]

    assert not unquoted
    assert re.search(r'(?<!")celery-unique-tasks\[', "pip install celery-unique-tasks[prometheus]")
