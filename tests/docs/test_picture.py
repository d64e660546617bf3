"""The pictures of the pages, in a browser: every word in them can be read, light or dark."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import docs
from tests.docs.pages import DOCS
from tests.support.browser import chromium, keep_screenshot

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow

#: Of the Web Content Accessibility Guidelines, level AA: for text, and for what is no text.
FOR_TEXT, FOR_SHAPES = 4.5, 3.0

DIAGRAMS = [DOCS / "explanation" / "call.svg", DOCS / "howto" / "follower.svg"]

#: What pages put behind the picture, whatever the reader's system prefers.
PAGES = {"light": "#ffffff", "dark": "#131416"}

SHAPES = """
const box = document.documentElement.viewBox.baseVal;
const drawn = tag => Array.from(document.querySelectorAll(tag)).map(element => {
  const b = element.getBBox();
  return {text: element.textContent, fill: getComputedStyle(element).fill,
          x: b.x, y: b.y, right: b.x + b.width, bottom: b.y + b.height};
});
return {width: box.width, height: box.height, texts: drawn('text'), rects: drawn('rect')};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture(params=["light", "dark"])
def preference(request: pytest.FixtureRequest, browser: Chrome) -> Iterator[str]:
    """What the reader's system prefers."""
    emulate(browser, request.param)
    yield request.param
    emulate(browser, "light")


def emulate(browser: Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def shapes(browser: Chrome, path: Path = docs.PICTURE) -> Any:
    browser.get(path.as_uri())
    return browser.execute_script(SHAPES)


def luminance(colour: str) -> float:
    """Of ``rgb(1, 2, 3)``, as the guidelines define it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_every_word_and_bar_stands_out_from_what_is_behind_it(browser, preference):
    drawn = shapes(browser)
    ground, *bars = drawn["rects"]

    # The picture brings its ground, so that it does not depend on the page's.
    assert (ground["x"], ground["y"]) == (0, 0)
    assert (ground["right"], ground["bottom"]) == (drawn["width"], drawn["height"])
    assert (luminance(ground["fill"]) < 0.5) == (preference == "dark")
    for text in drawn["texts"]:
        assert contrast(text["fill"], ground["fill"]) >= FOR_TEXT, text
    for bar in bars:
        assert contrast(bar["fill"], ground["fill"]) >= FOR_SHAPES, bar


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda path: path.stem)
def test_every_word_of_a_diagram_stands_out_and_lies_on_no_other(browser, preference, diagram):
    drawn = shapes(browser, diagram)
    ground, *boxes = drawn["rects"]

    assert (ground["right"], ground["bottom"]) == (drawn["width"], drawn["height"])
    assert (luminance(ground["fill"]) < 0.5) == (preference == "dark")
    assert len(drawn["texts"]) > 10
    for text in drawn["texts"]:
        behind = [box for box in boxes if lies_within(text, box)] or [ground]
        assert lies_within(text, ground), text
        assert contrast(text["fill"], behind[-1]["fill"]) >= FOR_TEXT, text
    for one, other in itertools.combinations(drawn["texts"], 2):
        apart = one["right"] <= other["x"] or other["right"] <= one["x"]
        assert apart or one["bottom"] <= other["y"] + 4 or other["bottom"] <= one["y"] + 4, one
    keep_screenshot(browser, f"{diagram.stem}-{preference}")


def lies_within(text: dict[str, Any], box: dict[str, Any]) -> bool:
    across = box["x"] <= text["x"] and text["right"] <= box["right"]
    return across and box["y"] <= text["y"] and text["bottom"] <= box["bottom"]


def test_every_diagram_is_on_a_page():
    shown = {
        (page.parent / name).resolve()
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"\]\(([\w./-]+\.svg)\)", page.read_text(encoding="utf-8"))
    }

    assert shown == {docs.PICTURE, *DIAGRAMS}


def test_no_word_is_cut_off_or_lies_on_another(browser):
    drawn = shapes(browser)

    assert len(drawn["texts"]) > 10
    for text in drawn["texts"]:
        assert text["x"] >= 0, text
        assert text["y"] >= 0, text
        assert text["right"] <= drawn["width"], text
        assert text["bottom"] <= drawn["height"], text
    for bar in drawn["rects"][1:]:
        beside = [
            t for t in drawn["texts"] if bar["y"] <= (t["y"] + t["bottom"]) / 2 <= bar["bottom"]
        ]
        assert len(beside) == 2
        assert all(t["right"] <= bar["x"] or t["x"] >= bar["right"] for t in beside), bar


@pytest.mark.parametrize("page", PAGES)
def test_what_a_reader_sees(browser, preference, page, tmp_path):
    """On a page whose colours the reader has chosen against those of the system, too."""
    html = tmp_path / "page.html"
    html.write_text(
        f'<body style="margin: 0; background: {PAGES[page]}">'
        f'<img src="{docs.PICTURE.as_uri()}" style="width: 900px">'
    )
    browser.get(html.as_uri())

    assert browser.execute_script("return document.images[0].naturalWidth") > 0
    keep_screenshot(browser, f"performance-{preference}-on-{page}")


def test_a_picture_in_one_grey_fails():
    """#444, as it was, on the dark page of the documentation."""
    assert contrast("rgb(68, 68, 68)", "rgb(19, 20, 22)") < FOR_TEXT
    assert contrast("rgb(68, 68, 68)", "rgb(255, 255, 255)") >= FOR_TEXT
