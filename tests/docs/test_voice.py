"""The texts are plain technical English: none of the words in ``old_voice.txt``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT, name_of

WORDS = Path(__file__).with_name("old_voice.txt")
SUFFIXES = (".css", ".lua", ".md", ".py", ".svg", ".yml", ".html", ".toml")


def replacements() -> dict[str, str]:
    """From each expression of the list to what to write instead."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" -> ") for line in lines if line and not line.startswith("#"))
    return {pattern.strip(): instead.strip() for pattern, instead in pairs}


#: A phrase may be broken over two lines, of a comment too.
_SPACE = r"\s+(?:[#*-]+:?\s+)?"
OLD_VOICE = re.compile(rf"\b({'|'.join(replacements()).replace(' ', _SPACE)})\b", re.IGNORECASE)


def texts() -> list[Path]:
    # The guides at the root are texts of the documentation, too.
    found = [README, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
    for folder in ("celery_unique", "docs"):
        built = ROOT / folder / "_build"
        files = (path for path in (ROOT / folder).rglob("*") if built not in path.parents)
        found += sorted(path for path in files if path.suffix in SUFFIXES)
    return found


def old_words(text: str) -> list[str]:
    """Line and text of every match."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"
        for match in OLD_VOICE.finditer(text)
    ]


@pytest.mark.parametrize("path", texts(), ids=name_of)
def test_no_word_of_the_old_voice_is_left(path):
    assert old_words(path.read_text(encoding="utf-8")) == []


def test_the_list_finds_its_words_and_leaves_technical_terms():
    old = "Nobody heard of it.\nThe key is given\nback by whoever asks the store, all the same."
    new = "Calls at once, at-least-once delivery, `give_back()`, a replay, an ongoing task."

    assert [found.partition(": ")[2] for found in old_words(old)] == [
        "Nobody",
        "heard",
        "given back",
        "whoever",
        "asks the store",
        "all the same",
    ]
    assert old_words(old)[2] == "line 2: given back"
    assert old_words(new) == []


def test_every_word_of_the_list_has_a_replacement():
    assert len(replacements()) > 20
    assert all(replacements().values())
