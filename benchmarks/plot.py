"""The picture for the documentation, as SVG text: two charts need no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.calls import MERGED
from benchmarks.contenders import CACHED, OURS

WIDTH, BAR, GAP, MARGIN, FONT = 760, 18, 8, 16, 13
#: How wide a letter is at most, on average and as a part of the font's size: fonts differ.
LETTER = 0.66

#: The picture has a ground of its own: a page may be dark where the reader's system is light.
STYLE = """<style>
.ground { fill: #ffffff } .ink { fill: #333333 } .own { fill: #12784f } .other { fill: #62798c }
@media (prefers-color-scheme: dark) {
.ground { fill: #1b1d21 } .ink { fill: #e2e4e8 } .own { fill: #35c98a } .other { fill: #8199ad }
}
</style>"""


def svg(results: dict[str, Any]) -> str:
    """Bars of what a call costs, those of this library in colour."""
    charts = [
        ("A new call takes, in microseconds", _new(results["new"])),
        ("A duplicate takes, in microseconds", _duplicate(results["duplicate"])),
    ]
    parts, top = [], MARGIN
    for title, bars in charts:
        drawn, top = _chart(title, bars, top)
        parts += drawn
    style = f'font-family="sans-serif" font-size="{FONT}"'
    box = f'viewBox="0 0 {WIDTH} {top}" role="img" aria-label="What a call costs"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>\n{STYLE}\n'
        f'<rect class="ground" width="{WIDTH}" height="{top}" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _new(new: dict[str, Any]) -> list[tuple[str, float]]:
    # Whole calls: what ours adds may be less than nothing.
    return [(name, each["median_us"]) for name, each in new.items() if name not in CACHED]


def _duplicate(again: dict[str, Any]) -> list[tuple[str, float]]:
    # No other library merges calls: there is nothing to compare that bar with.
    left_out = (*CACHED, MERGED)
    return [(name, each["median_us"]) for name, each in again.items() if name not in left_out]


def _chart(title: str, bars: Sequence[tuple[str, float]], top: int) -> tuple[list[str], int]:
    # One that takes a thousand times as long would leave nothing to see of the others.
    ordered = sorted(value for _, value in bars)
    largest = ordered[-1] if ordered[-1] < 4 * ordered[-2] else 1.5 * ordered[-2]
    heading = f'x="{MARGIN}" y="{top + 14}" font-weight="bold"'
    parts = [f'<text class="ink" {heading}>{escape(title)}</text>']
    top += 26
    begin = MARGIN + max(_width(name) for name, _ in bars) + 8
    room = WIDTH - MARGIN - begin - 6 - max(_width(_said(value, largest)) for _, value in bars)
    for name, value in bars:
        parts += _bar(name, value, largest, begin, room, top)
        top += BAR + GAP
    return parts, top + 14


def _bar(name: str, value: float, largest: float, begin: float, room: float, top: int) -> list[str]:
    width = max(1.0, room * min(value, largest) / largest)
    kind = "own" if name == OURS else "other"
    middle = top + BAR - 5
    right = f'x="{begin - 8:.1f}" text-anchor="end"'
    place = f'x="{begin:.1f}" y="{top}" width="{width:.1f}" height="{BAR}"'
    beside = f'x="{begin + width + 6:.1f}" y="{middle}"'
    return [
        f'<text class="ink" {right} y="{middle}">{escape(name)}</text>',
        f'<rect class="{kind}" {place}/>',
        f'<text class="ink" {beside}>{_said(value, largest)}</text>',
    ]


def _said(value: float, largest: float) -> str:
    return f"{value:,.0f}" + (" (bar is cut short)" if value > largest else "")


def _width(text: str) -> float:
    return LETTER * FONT * len(text)
