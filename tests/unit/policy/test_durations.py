"""Durations: what is accepted, what is refused, and that text and length agree."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_unique.exceptions import InvalidPolicy
from celery_unique.policy.durations import (
    LONGEST,
    OJS_PATTERN,
    SHORTEST,
    parse_duration,
    parse_ojs_duration,
    to_iso8601,
)

durations = st.timedeltas(min_value=SHORTEST, max_value=LONGEST)

ACCEPTED = [
    (600, timedelta(minutes=10)),
    (0.5, timedelta(milliseconds=500)),
    (timedelta(days=2), timedelta(days=2)),
    ("PT10M", timedelta(minutes=10)),
    ("PT0.25S", timedelta(milliseconds=250)),
    ("PT0,25S", timedelta(milliseconds=250)),
    ("PT1.5H", timedelta(minutes=90)),
    ("P1W", timedelta(days=7)),
    ("P1W2D", timedelta(days=9)),
    ("P1M", timedelta(days=30)),
    ("P1Y", timedelta(days=365)),
    ("P1.5Y", timedelta(days=547.5)),
    ("P1Y2M3W4DT5H6M7.5S", timedelta(days=365 + 60 + 21 + 4, hours=5, minutes=6, seconds=7.5)),
    (LONGEST, LONGEST),
    (SHORTEST, SHORTEST),
]


@pytest.mark.parametrize(("value", "expected"), ACCEPTED)
def test_it_is_accepted(value, expected):
    assert parse_duration(value, "period") == expected


NO_DURATION = [
    None, True, False, "", "P", "T", "10m", "600", "ten minutes", "pt10m", " PT10M", "P1D1Y",
    math.nan, math.inf, -math.inf, b"PT10M", [600], {"minutes": 10}, 600j, Fraction(1, 2), object(),
]  # fmt: skip
TOO_SHORT = [
    0,
    0.0,
    -1,
    0.0001,
    -1e300,
    timedelta(0),
    timedelta(seconds=-1),
    "PT0S",
    "P0D",
    "PT",
    "-PT5M",
]
TOO_LONG = [
    1e300,
    10**400,
    10**5000,
    timedelta.max,
    "P1001Y",
    "P99999999999999D",
    "PT" + "9" * 5000 + "S",
]


@pytest.mark.parametrize(
    ("value", "complaint", "cure"),
    [
        *[(value, "is not a duration", "ISO 8601 duration ('PT10M')") for value in NO_DURATION],
        *[(value, "is too short", "at least one millisecond") for value in TOO_SHORT],
        *[(value, "is too long", "at most 1000 years") for value in TOO_LONG],
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else type(value).__name__,
)
def test_it_is_refused_with_the_field_and_the_cure(value, complaint, cure):
    with pytest.raises(InvalidPolicy) as raised:
        parse_duration(value, "period")

    message = str(raised.value)
    assert message.startswith("period: ")
    assert complaint in message
    assert cure in message
    assert raised.value.field == "period"
    assert len(message) < 300


def test_the_field_can_go_by_another_name():
    with pytest.raises(InvalidPolicy, match=r"^period \(unique_for\): ") as raised:
        parse_duration("10m", "period", "period (unique_for)")

    assert raised.value.field == "period"


@given(durations)
def test_text_and_length_agree(duration):
    text = to_iso8601(duration)

    assert parse_duration(text, "period") == duration
    assert parse_ojs_duration(text) == duration


@given(durations)
def test_what_was_parsed_parses_again_to_itself(duration):
    assert parse_duration(parse_duration(duration, "period"), "period") == duration


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(0), "PT0S"),
        (timedelta(minutes=10), "PT10M"),
        (timedelta(days=7), "P7D"),
        (timedelta(hours=25), "P1DT1H"),
        (timedelta(microseconds=1500), "PT0.0015S"),
        (timedelta(days=1, hours=2, minutes=3, seconds=4, microseconds=5), "P1DT2H3M4.000005S"),
    ],
)
def test_text_of_a_duration(duration, text):
    assert to_iso8601(duration) == text


def test_a_negative_duration_has_no_text():
    with pytest.raises(ValueError, match="never negative"):
        to_iso8601(timedelta(seconds=-1))


@given(st.from_regex(OJS_PATTERN, fullmatch=True))
def test_everything_ojs_can_write_is_a_duration_or_out_of_bounds(text):
    complaint = complaint_about(text)

    # "P" alone is in the pattern, and says nothing.
    assert complaint in {None, "is too short", "is too long"} or text == "P"


def complaint_about(text: str) -> str | None:
    try:
        parse_ojs_duration(text)
    except InvalidPolicy as error:
        return re.split(r"(is [\w ]+)", str(error))[1]
    return None


@pytest.mark.parametrize(
    "value",
    [600, 600.0, timedelta(minutes=10), None, "PT1.5H", "PT1,5S", "-PT5M", "+PT5M", "PT5M\n",
     "PT٣M", "P0001-01-01T00:00:00", "", "P1D1Y", ["PT5M"]],
)  # fmt: skip
def test_ojs_has_one_form_only(value):
    with pytest.raises(InvalidPolicy, match=r"period: .*'PT10M'.*Open Job Spec requires"):
        parse_ojs_duration(value)
