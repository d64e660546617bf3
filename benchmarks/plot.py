"""The picture for the documentation, as SVG written by hand: no library has to draw two charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.contenders import OURS, PLAIN
from benchmarks.stage import FLOOR

WIDTH, BAR, GAP, LABEL, CHART = 760, 18, 8, 150, 480
INK, OWN, OTHER = "#444", "#2a7", "#9ab"


def svg(results: dict[str, Any]) -> str:
    """Bars of what a call costs, those of this library in colour."""
    charts = [
        ("A new call adds, in microseconds", _new(results["new"])),
        ("A duplicate takes, in microseconds", _duplicate(results["duplicate"])),
    ]
    parts, top = [], 10
    for title, bars in charts:
        drawn, top = _chart(title, bars, top)
        parts += drawn
    style = 'font-family="sans-serif" font-size="13"'
    box = f'viewBox="0 0 {WIDTH} {top}" role="img" aria-label="What a call costs"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _new(new: dict[str, Any]) -> list[tuple[str, float]]:
    added = [(name, each["added_us"]) for name, each in new.items() if "added_us" in each]
    return [(FLOOR, new[FLOOR]["median_us"]), *added]


def _duplicate(again: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, each["median_us"]) for name, each in again.items() if name != PLAIN]


def _chart(title: str, bars: Sequence[tuple[str, float]], top: int) -> tuple[list[str], int]:
    # One that takes a thousand times as long would leave nothing to see of the others.
    ordered = sorted(value for _, value in bars)
    largest = ordered[-1] if ordered[-1] < 4 * ordered[-2] else 1.5 * ordered[-2]
    parts = [f'<text x="0" y="{top + 14}" font-weight="bold" fill="{INK}">{escape(title)}</text>']
    top += 26
    for name, value in bars:
        parts += _bar(name, value, largest, top)
        top += BAR + GAP
    return parts, top + 14


def _bar(name: str, value: float, largest: float, top: int) -> list[str]:
    width = max(1.0, CHART * min(value, largest) / largest)
    colour = OWN if name == OURS else OTHER
    said = f"{value:,.0f}" + (" (cut off here)" if value > largest else "")
    middle = top + BAR - 5
    right = f'x="{LABEL - 8}" text-anchor="end"'
    return [
        f'<text {right} y="{middle}" fill="{INK}">{escape(name)}</text>',
        f'<rect x="{LABEL}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<text x="{LABEL + width + 6:.1f}" y="{middle}" fill="{INK}">{said}</text>',
    ]
