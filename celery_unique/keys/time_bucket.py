"""``time_bucket()``: names for stretches of the calendar, for keys of a minute, an hour, a month.

A bucket is aligned to the calendar and not to the first call, so calls at 11:59 and 12:01 are in
two buckets of an hour. "Not twice within an hour" is a window, ``unique_for``.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery_unique.exceptions import InvalidPolicy, shown

__all__ = ["time_bucket"]

_MINUTES_OF_DAY = 24 * 60
_MONTHS_OF_YEAR = 12
_PERIOD = re.compile(
    r"PT(?P<minutes>\d{1,4})M|PT(?P<hours>\d{1,2})H"
    r"|P(?P<days>\d{1,3})D|P(?P<weeks>\d{1,2})W|P(?P<months>\d{1,2})M",
    re.ASCII,
)


def time_bucket(period: str, at: datetime | None = None, tz: str | tzinfo = "UTC") -> str:
    """Return the name of the bucket of this length in which a moment lies.

    `period` is ISO 8601 of one unit: minutes or hours that divide a day evenly (``PT5M``,
    ``PT1H``), days, weeks, or months that divide a year evenly (``P1D``, ``P1W``, ``P1M``). `at`
    is an aware datetime, by default now; `tz` is the zone in whose calendar the bucket lies.
    """
    unit, count = _parsed(period)
    zone = _zone(tz)
    moment = _moment(at).astimezone(zone)
    if unit == "minutes":
        return _part_of_day(moment, zone, count)
    return _days(moment.date(), unit, count)


# -- what is given ---------------------------------------------------------------------------------


def _parsed(period: object) -> tuple[str, int]:
    match = _PERIOD.fullmatch(period) if isinstance(period, str) else None
    if match is None:
        raise _not_a_period(period)
    unit = match.lastgroup or ""
    count = int(match[unit])
    if unit == "hours":
        unit, count = "minutes", count * 60
    whole = {"minutes": _MINUTES_OF_DAY, "months": _MONTHS_OF_YEAR}.get(unit)
    if count == 0 or (whole is not None and whole % count):
        raise _not_a_period(period)
    # The same length has one name: PT1440M is the day.
    return ("days", 1) if (unit, count) == ("minutes", _MINUTES_OF_DAY) else (unit, count)


def _not_a_period(period: object) -> InvalidPolicy:
    return InvalidPolicy(
        f"period: {shown(period)} is not a time bucket. Use minutes or hours that divide a day "
        "evenly ('PT1M', 'PT5M', 'PT1H', 'PT6H', ...), days ('P1D'), weeks ('P1W'), or months that "
        "divide a year evenly ('P1M', 'P3M', ...)",
        field="period",
    )


def _zone(tz: Any) -> tzinfo:
    if isinstance(tz, tzinfo):
        return tz
    if tz == "UTC":
        return UTC  # known everywhere, with or without a database of zones
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, TypeError, OSError):
        raise InvalidPolicy(
            f"tz: {shown(tz)} is not a time zone that this machine knows: give a name such as "
            "'Europe/Berlin'; if that is one, install tzdata",
            field="tz",
        ) from None


def _moment(at: object) -> datetime:
    if at is None:
        return datetime.now(UTC)
    if not isinstance(at, datetime):
        raise InvalidPolicy(f"at: {shown(at)} is not a datetime", field="at")
    if at.utcoffset() is None:
        # In an assumed zone it could silently be in a wrong bucket.
        raise InvalidPolicy(
            f"at: {shown(at)} has no time zone, so it names no moment: give it one, "
            "datetime.now(timezone.utc) or at.replace(tzinfo=...)",
            field="at",
        )
    return at


# -- buckets ---------------------------------------------------------------------------------------


def _days(day: date, unit: str, count: int) -> str:
    if unit == "months":
        first = (day.month - 1) // count * count + 1
        return f"{day.year:04}-{first:02}"
    # Several days or weeks are counted from the first Monday of the calendar, 0001-01-01.
    length = count * 7 if unit == "weeks" else count
    start = date.fromordinal((day.toordinal() - 1) // length * length + 1)
    if unit == "days":
        return start.isoformat()
    year, week, _ = start.isocalendar()
    return f"{year:04}-W{week:02}"


def _part_of_day(moment: datetime, zone: tzinfo, minutes: int) -> str:
    """By the local time of the zone, with its offset, which distinguishes the two hours that
    are both 02:00 when summer time ends."""
    wall = moment.replace(tzinfo=None, fold=0)
    passed = (wall.hour * 60 + wall.minute) // minutes * minutes
    start = datetime.combine(wall.date(), datetime.min.time()) + timedelta(minutes=passed)
    timespec = "minutes" if minutes % 60 else "hours"
    if str(zone) == "UTC":
        return start.isoformat(timespec=timespec)
    return _begun(start, minutes, moment, zone).isoformat(timespec=timespec)


def _begun(start: datetime, minutes: int, moment: datetime, zone: tzinfo) -> datetime:
    """The local time, with its offset, at which the bucket of `moment` began."""
    then = moment.astimezone(UTC)
    shown_at = [at for at in _moments_of(start, zone) if at <= then]
    if shown_at:
        began = max(shown_at)
        following = _moments_of(start + timedelta(minutes=minutes), zone)
        if not any(began < at <= then for at in following):
            return began.astimezone(zone)
    # The clock was set past the beginning of this bucket, or back into it from the next one:
    # it begins with that change, and so under the offset that counts now.
    return start.replace(tzinfo=timezone(moment.utcoffset() or timedelta()))


def _moments_of(wall: datetime, zone: tzinfo) -> list[datetime]:
    """When the clock of the zone shows this time: once, twice, or not at all."""
    found = [wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)]
    return [at for at in found if at.astimezone(zone).replace(tzinfo=None, fold=0) == wall]
