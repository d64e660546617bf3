"""The pages of README and docs, taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is where its text begins, counted from 1."""

    language: str
    text: str
    line: int
    options: dict[str, str] = field(default_factory=dict)


def all_pages() -> list[Path]:
    built = DOCS / "_build"
    pages = [page for page in DOCS.rglob("*.md") if built not in page.parents]
    return [README, *sorted(pages)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


_FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=ticks)\s*$", re.MULTILINE | re.DOTALL
)
_OPTION = re.compile(r"^:(?P<name>[\w-]+): *(?P<value>.*)\n")


def blocks(page: Path) -> list[Block]:
    return list(_blocks(page.read_text(encoding="utf-8")))


def _blocks(source: str) -> Iterator[Block]:
    for match in _FENCE.finditer(source):
        info, text = match["info"].strip(), match["text"]
        line = source.count("\n", 0, match.start("text")) + 1
        directive, _, argument = info.partition(" ")
        if directive != "{code-block}":
            yield Block(info, text, line)
            continue
        options = {}
        while option := _OPTION.match(text):
            options[option["name"]] = option["value"]
            text, line = text[option.end() :], line + 1
        yield Block(argument, text, line, options)


def python_script(page: Path) -> str:
    """The page's Python blocks as one script, each at the line where it stands on the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and "caption" not in block.options:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def without_blocks(page: Path) -> str:
    """The page's text, where what stands in blocks and code spans is left out."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "`code`", text, flags=re.DOTALL)


def named_tests(text: str) -> list[tuple[str, str]]:
    """File and name of every test that a text names."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text)


class EvidencedRow(NamedTuple):
    """A row of a page's tables, and the cell of its table "Tests" with the same name."""

    name: str
    cells: list[str]
    tests: str


def rows_with_tests(page: Path) -> list[EvidencedRow]:
    """Every row that begins with a name such as ``W12``; each must stand in "Tests" once."""
    claims, _, evidence = page.read_text(encoding="utf-8").partition("\n## Tests\n")
    tests = dict(re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", evidence, re.MULTILINE))
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", claims, re.MULTILINE)
    names = [name for name, _ in rows]
    assert len(set(names)) == len(names)
    assert tests.keys() == set(names)
    return [
        EvidencedRow(name, [cell.strip() for cell in rest.split(" | ")], tests[name])
        for name, rest in rows
    ]
