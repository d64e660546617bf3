"""How things are put for people."""

from __future__ import annotations

import io

import pytest

from celery_unique.cli.output import Screen, columns_of, printable, shortened
from celery_unique.keys.digest import short_key
from celery_unique.operations.select import brief


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("shop.rebuild", "shop.rebuild"),
        ("größe 大きさ", "größe 大きさ"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\\x1b", "\\\\x1b"),
        ("\udc80", "\\udc80"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_not_simply_show_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_two_texts_never_look_the_same():
    texts = ["\x1b", "\\x1b", "\\\\x1b", "\u200b", "\\u200b"]

    assert len({printable(text) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (-5, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m 1s"),
        (3600, "1h"),
        (3661, "1h 1m"),
        (86_400, "1d"),
        (90_000, "1d 1h"),
        (86_400 * 400 + 7200, "400d 2h"),
    ],
)
def test_an_age_has_two_units_at_most(seconds, shown):
    assert brief(seconds * 1000) == shown
    assert brief(seconds * 1000, units=1) == shown.split(maxsplit=1)[0]


def test_a_long_text_is_cut_in_its_middle():
    assert shortened("shop.tasks.rebuild_index", 24) == "shop.tasks.rebuild_index"
    assert shortened("shop.tasks.rebuild_the_index", 20) == "shop.tas...the_index"
    assert len(shortened("x" * 500, 20)) == 20


def test_a_wide_character_takes_two_columns_and_a_combining_one_none():
    assert columns_of("大a") == 3
    assert columns_of("e\u0301") == 1


def test_a_terminal_that_cannot_show_a_character_is_no_error(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)

    Screen().line("größe 大")

    stream.flush()
    assert stream.buffer.getvalue() == b"gr\\xf6\\xdfe \\u5927\n"  # type: ignore[attr-defined]


def test_a_key_is_shortened_to_its_version_and_12_digits():
    assert short_key("1:" + "0123456789abcdef" * 4) == "1:0123456789ab"
