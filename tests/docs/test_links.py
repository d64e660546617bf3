"""Links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages, name_of, without_blocks

PAGES = [
    *all_pages(),
    *(
        ROOT / name
        for name in (
            "CODE_OF_CONDUCT.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "CHANGELOG.md",
            "example_project/README.md",
            "llms.txt",
        )
    ),
]
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+://|mailto:")


def links(page: Path) -> list[str]:
    return [
        match["target"]
        for match in _LINK.finditer(without_blocks(page))
        if not _ELSEWHERE.match(match["target"])
    ]


def anchors(page: Path) -> set[str]:
    """Headings as GitHub and MyST name them, and MyST's own ``(name)=``."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_page_and_a_heading(page):
    dead = [link for link in links(page) if not leads_somewhere(page, link)]

    assert dead == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target)


def test_a_dead_link_would_be_seen():
    readme = ROOT / "README.md"

    assert leads_somewhere(readme, "README.md#install")
    assert not leads_somewhere(readme, "README.md#nowhere")
    assert not leads_somewhere(readme, "docs/nowhere.md")
    assert links(readme), "the test sees no links at all"


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for index in (ROOT / "docs").rglob("index.md"):
        for toctree in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.DOTALL):
            entries = [line for line in toctree.splitlines() if line and line[0] != ":"]
            listed |= {(index.parent / f"{entry}.md").resolve() for entry in entries}

    pages = {page for page in all_pages() if ROOT / "docs" in page.parents}

    assert pages - listed == {ROOT / "docs" / "index.md"}
    assert listed <= pages


def test_every_page_for_users_is_in_the_overview_for_programs():
    named = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "llms.txt")}
    subjects = (ROOT / "docs" / name for name in ("howto", "reference", "explanation"))
    pages = {page for each in subjects for page in each.glob("*.md") if page.stem != "index"}

    assert pages - named == set()
