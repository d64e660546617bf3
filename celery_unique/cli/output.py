"""Output of the commands: escaped text, with colours on a terminal only.

Task ids, task names, names of workers and idempotency keys come from outside. Unprintable
characters in them are escaped, so that none can move the cursor, hide a line or forge one.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

#: Between two columns.
GAP = "  "
UNLIMITED = 10_000

COLOURS = {
    "pending": "yellow",
    "scheduled": "cyan",
    "available": "cyan",
    "active": "green",
    "retryable": "yellow",
    "released": "magenta",
    "error": "red",
    "warning": "yellow",
    "note": "cyan",
    "ok": "green",
}


def printable(text: str) -> str:
    """The text with every unprintable character escaped."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


class Command(str):
    """Text to be copied into a shell: never wrapped, however narrow the terminal is."""

    __slots__ = ()


class Screen:
    """The output of one command. ``colours`` takes effect on a terminal only."""

    def __init__(self, *, colours: bool = True) -> None:
        self._colours = colours

    def line(self, text: str = "", *, err: bool = False) -> None:
        stream = sys.stderr if err else sys.stdout
        # A terminal that cannot show a character must not abort the command.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        click.echo(text, err=err, color=None if self._colours else False)

    def json(self, document: Any) -> None:
        """One document in one line of ASCII."""
        self.line(json.dumps(document, default=plain, ensure_ascii=True))

    def styled(self, text: str, kind: str = "", *, bold: bool = False) -> str:
        """Printable text in the colour of a state or of a finding's level."""
        return click.style(text, fg=COLOURS.get(kind), bold=bold or None)

    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    def width(self) -> int:
        """The columns of the terminal; output to a program is not cut."""
        return shutil.get_terminal_size().columns if self.is_terminal() else UNLIMITED

    def facts(self, facts: Iterable[tuple[str, str]], indent: str = "  ") -> None:
        """Names and values below each other; empty values are left out."""
        shown = [(name, value) for name, value in facts if value]
        longest = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            label = f"{indent}{self.styled(name.ljust(longest), bold=True)}{GAP}"
            self.words(value, first=label, indent=" " * (len(indent) + longest + len(GAP)))

    def words(
        self,
        text: str,
        *,
        first: str = "",
        indent: str = "",
        kind: str = "",
        bold: bool = False,
        err: bool = False,
    ) -> None:
        """Printable text after ``first``, wrapped between words on a terminal."""
        if isinstance(text, Command):
            self.line(first + text, err=err)
            return
        width = max(self.width() - len(indent), 20)
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        for n, line in enumerate(lines or [""]):
            shown = self.styled(line, kind, bold=bold) if kind or bold else line
            self.line((indent if n else first) + shown, err=err)


class Table:
    """Rows of a stream, so the widths are given beforehand."""

    def __init__(
        self, screen: Screen, columns: Sequence[tuple[str, int]], *, cut: frozenset[str]
    ) -> None:
        """``cut`` names the columns whose text is cut to their width; others may exceed it."""
        self._screen = screen
        self._widths = [width for _, width in columns]
        self._headings = [name for name, _ in columns]
        self._cut = cut
        self._begun = False

    def row(self, cells: Sequence[str], kinds: Mapping[int, str] | None = None) -> None:
        if not self._begun:
            self._begun = True
            self._write(self._headings, dict.fromkeys(range(len(self._headings)), "heading"))
        shown = [self._shown(n, printable(cell)) for n, cell in enumerate(cells)]
        self._write(shown, kinds or {})

    def _shown(self, n: int, text: str) -> str:
        return shortened(text, self._widths[n]) if self._headings[n] in self._cut else text

    def _write(self, cells: Sequence[str], kinds: Mapping[int, str]) -> None:
        last = len(cells) - 1
        parts = []
        for n, (cell, width) in enumerate(zip(cells, self._widths, strict=True)):
            padded = cell if n == last else cell + " " * (width - columns_of(cell))
            kind = kinds.get(n, "")
            parts.append(self._screen.styled(padded, kind, bold=kind == "heading"))
        self._screen.line(GAP.join(parts).rstrip())


def columns_of(text: str) -> int:
    """The columns of a terminal that a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, width: int) -> str:
    """A printable text cut in its middle to at most this many columns."""
    if columns_of(text) <= width:
        return text
    head = max(1, (width - 3) // 2)
    tail = max(1, width - 3 - head)
    return f"{text[:head]}...{text[-tail:]}"


def moment(when: datetime | None) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S UTC") if when else ""


def plain(value: Any) -> Any:
    """The JSON form of other values."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
