"""Durations: seconds, a ``timedelta`` or ISO 8601 text, always kept as a ``timedelta``.

A duration here is a fixed length of time, so a year is 365 days and a month is 30 days,
whatever the calendar.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta

from celery_unique.exceptions import InvalidPolicy, shown

__all__ = ["parse_duration", "parse_ojs_duration", "to_iso8601"]

DAYS_PER_YEAR = 365
DAYS_PER_MONTH = 30

#: Stores count in milliseconds, and less than one would be none.
SHORTEST = timedelta(milliseconds=1)
#: The end of a longer one, counted from today, need not be a date that Python has.
LONGEST = timedelta(days=1000 * DAYS_PER_YEAR)

#: The pattern of the Open Job Spec, section 13.
OJS_PATTERN = re.compile(
    r"P(?:\d+Y)?(?:\d+M)?(?:\d+W)?(?:\d+D)?(?:T(?:\d+H)?(?:\d+M)?(?:\d+(?:\.\d+)?S)?)?",
    re.ASCII,
)

_ACCEPTED = (
    "give seconds as a number (600), a timedelta (timedelta(minutes=10)) "
    "or an ISO 8601 duration ('PT10M')"
)


def parse_duration(value: object, field: str, name: str | None = None) -> timedelta:
    """Return `value` as a timedelta, or raise InvalidPolicy for `field`, called `name`."""
    name = name or field
    # bool is an int, but unique_for=True is a slip and not one second.
    if isinstance(value, timedelta):
        duration: timedelta | None = value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        duration = _from_seconds(value)
    else:
        duration = _from_iso8601(value)
    if duration is None:
        raise InvalidPolicy(f"{name}: {shown(value)} is not a duration: {_ACCEPTED}", field=field)
    return _bounded(duration, value, field, name)


def parse_ojs_duration(value: object, field: str = "period") -> timedelta:
    """Return the duration of an Open Job Spec document, which has one form only."""
    matches = isinstance(value, str) and OJS_PATTERN.fullmatch(value)
    duration = _from_iso8601(value) if matches else None
    if duration is None:
        raise InvalidPolicy(
            f"{field}: {shown(value)} is not a duration: "
            "give an ISO 8601 duration such as 'PT10M' or 'P7D', as the Open Job Spec requires",
            field=field,
        )
    return _bounded(duration, value, field, field)


def to_iso8601(value: timedelta) -> str:
    """Return the ISO 8601 text of a duration that is not negative, in days and smaller units."""
    if value < timedelta(0):
        raise ValueError(f"a duration of this library is never negative: {value!r}")
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    day_part = f"{value.days}D" if value.days else ""
    time_part = (
        (f"{hours}H" if hours else "")
        + (f"{minutes}M" if minutes else "")
        + _seconds_part(seconds, value.microseconds)
    )
    if not day_part and not time_part:
        return "PT0S"
    return f"P{day_part}" + (f"T{time_part}" if time_part else "")


def _seconds_part(seconds: int, microseconds: int) -> str:
    if microseconds:
        return f"{seconds}.{microseconds:06d}".rstrip("0") + "S"
    return f"{seconds}S" if seconds else ""


def _from_seconds(value: float) -> timedelta | None:
    try:
        return timedelta(seconds=value) if math.isfinite(value) else None
    except OverflowError:
        return timedelta.max if value > 0 else timedelta.min


def _from_iso8601(value: object) -> timedelta | None:
    """Return the duration, None if `value` is none, and the longest if it is out of range."""
    import isodate  # slow to import, and most policies need none of it

    try:
        parsed = isodate.parse_duration(value)
        if isinstance(parsed, timedelta):
            return parsed
        days = parsed.years * DAYS_PER_YEAR + parsed.months * DAYS_PER_MONTH
        return timedelta(days=float(days), seconds=parsed.tdelta.total_seconds())
    except OverflowError:
        return timedelta.max
    except (TypeError, ValueError, ArithmeticError):
        return None


def _bounded(duration: timedelta, value: object, field: str, name: str) -> timedelta:
    if duration > LONGEST:
        raise InvalidPolicy(
            f"{name}: {shown(value)} is too long: a duration is at most 1000 years. "
            "Leave it out if no end is meant",
            field=field,
        )
    if duration < SHORTEST:
        raise InvalidPolicy(
            f"{name}: {shown(value)} is too short: a duration is at least one millisecond. "
            "Leave it out if no time is meant",
            field=field,
        )
    return duration


def milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))
