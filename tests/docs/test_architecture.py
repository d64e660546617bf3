"""The page on the architecture names files, packages and layers that exist."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.pages import DOCS, ROOT

PACKAGE = ROOT / "celery_unique"
PAGE = DOCS / "explanation" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
WALKS = ("New call", "Duplicate", "Replace", "Join", "apply_many", "Worker", "why")


def files(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.(?:py|lua))`", text)


@pytest.mark.parametrize("file", sorted(set(files(TEXT))))
def test_every_file_that_is_named_exists(file):
    assert (PACKAGE / file).is_file()


def test_the_tree_is_that_of_the_package():
    tree = TEXT.split("## Layers")[0]
    shown = set(re.findall(r"^  (\w+(?:\.py|/)) ", tree, re.MULTILINE))
    inner = re.findall(r"^    ([\w/]+)/ ", tree, re.MULTILINE)

    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if path.name not in ("py.typed", "__pycache__")
    }
    assert shown == there
    assert all((PACKAGE / "stores" / folder).is_dir() for folder in inner)


def test_the_layers_are_those_that_the_linter_checks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    checked = [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]

    rows = re.findall(r"^\| (\d) \| (.*?) \|", TEXT, re.MULTILINE)

    assert [set(re.findall(r"`(\w+)`", modules)) for _, modules in rows] == checked
    assert [int(number) for number, _ in rows] == list(range(len(checked), 0, -1))


@pytest.mark.parametrize("walk", WALKS)
def test_every_step_of_a_walk_names_its_file(walk):
    section = re.search(rf"^### {walk}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section
    steps = re.split(r"^\d+\. ", section[1], flags=re.MULTILINE)[1:]

    assert len(steps) >= 5
    assert [step for step in steps if not files(step)] == []
