"""Names of stretches of the calendar, in UTC and in zones that change their clocks."""

from __future__ import annotations

import itertools
import os
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_unique import InvalidPolicy, time_bucket

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
ZONES = ("UTC", BERLIN, NEW_YORK, LORD_HOWE, "Asia/Kolkata", "Asia/Kathmandu", "America/Havana")
MINUTES = tuple(n for n in range(1, 1440) if 1440 % n == 0)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc]


AT = utc(2026, 1, 20, 14, 7, 31)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "name"),
    [
        ("PT1M", "2026-01-20T14:07"),
        ("PT5M", "2026-01-20T14:05"),
        ("PT15M", "2026-01-20T14:00"),
        ("PT90M", "2026-01-20T13:30"),
        ("PT1H", "2026-01-20T14"),
        ("PT60M", "2026-01-20T14"),
        ("PT6H", "2026-01-20T12"),
        ("P1D", "2026-01-20"),
        ("PT24H", "2026-01-20"),
        ("PT1440M", "2026-01-20"),
        ("P7D", "2026-01-19"),
        ("P1W", "2026-W04"),
        ("P1M", "2026-01"),
        ("P3M", "2026-01"),
        ("P12M", "2026-01"),
    ],
)
def test_a_bucket_has_a_name_that_people_can_read(period, name):
    assert time_bucket(period, AT) == name


@pytest.mark.parametrize(
    ("period", "tz", "name"),
    [
        ("PT5M", BERLIN, "2026-01-20T15:05+01:00"),
        ("PT1H", NEW_YORK, "2026-01-20T09-05:00"),
        ("PT1H", "Asia/Kolkata", "2026-01-20T19+05:30"),
        ("PT1H", "Europe/London", "2026-01-20T14+00:00"),
        ("P1D", "Pacific/Auckland", "2026-01-21"),
        ("P1D", ZoneInfo(BERLIN), "2026-01-20"),
        ("PT1H", timezone(timedelta(hours=-3)), "2026-01-20T11-03:00"),
        ("PT1H", UTC, "2026-01-20T14"),
        ("PT1H", ZoneInfo("UTC"), "2026-01-20T14"),
    ],
)
def test_a_zone_has_a_calendar_of_its_own(period, tz, name):
    assert time_bucket(period, AT, tz) == name


@pytest.mark.parametrize(
    ("day", "week"),
    [
        ((2026, 1, 1), "2026-W01"),
        ((2027, 1, 3), "2026-W53"),
        ((2027, 1, 4), "2027-W01"),
        ((2024, 12, 30), "2025-W01"),
    ],
)
def test_weeks_begin_on_monday_and_belong_to_the_year_of_iso_8601(day, week):
    assert time_bucket("P1W", utc(*day)) == week


def test_quarters_begin_in_january_april_july_and_october():
    months = [time_bucket("P3M", utc(2026, month, 15)) for month in range(1, 13)]

    assert months == [f"2026-{first:02}" for first in (1, 4, 7, 10) for _ in range(3)]


def test_without_a_moment_it_is_now():
    before = time_bucket("PT1M", datetime.now(UTC))
    now = time_bucket("PT1M")
    after = time_bucket("PT1M", datetime.now(UTC))

    assert now in (before, after)


def test_it_does_not_matter_in_which_zone_the_moment_is_given():
    there = AT.astimezone(ZoneInfo("Asia/Tokyo"))

    assert time_bucket("P1D", there) == time_bucket("P1D", AT) == "2026-01-20"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "period",
    [
        "PT7M", "PT0M", "PT5H", "PT25H", "PT48H", "PT1441M", "PT30S", "P5M", "P0D", "P1Y", "P1DT1H",
        "PT1H30M", "PT1.5H", "P1", "", "hour", "-PT1H", "pt1h", " PT1H", "PT1H\n", "PT\u0665M",
        3600, None, timedelta(hours=1),
    ],
)  # fmt: skip
def test_a_period_that_is_no_bucket_is_refused_with_what_is_accepted(period):
    with pytest.raises(InvalidPolicy, match=r"(?s)PT5M.*PT1H.*P1D.*P1W.*P1M") as caught:
        time_bucket(period, AT)

    assert caught.value.field == "period"


@pytest.mark.parametrize(
    ("at", "tz", "field", "message"),
    [
        (datetime(2026, 1, 20, 14), "UTC", "at", "no time zone"),  # noqa: DTZ001
        *((at, "UTC", "at", "datetime") for at in (0, "2026-01-20", date(2026, 1, 20))),
        *((AT, tz, "tz", "time zone") for tz in ("Europe/Atlantis", "", "../etc/passwd", None)),
        *((AT, tz, "tz", "time zone") for tz in (3, "\0")),
    ],
)
def test_a_moment_or_zone_that_is_none_is_refused(at, tz, field, message):
    with pytest.raises(InvalidPolicy, match=message) as caught:
        time_bucket("PT1H", at, tz)

    assert caught.value.field == field


# -- clocks that are changed -----------------------------------------------------------------------


def begins(period: str, tz: str, first: datetime, hours: int) -> list[tuple[str, str]]:
    """When, on the wall, a bucket of another name begins, and its name."""
    moments = [first + timedelta(minutes=n) for n in range(hours * 60)]
    found: list[tuple[str, str]] = []
    for moment in moments:
        name = time_bucket(period, moment, tz)
        if not found or found[-1][1] != name:
            found.append((f"{moment.astimezone(ZoneInfo(tz)):%H:%M}", name))
    return found


#: Period, zone, first moment and hours, and when on the wall which bucket begins.
CHANGES: dict[str, tuple[str, str, datetime, int, str]] = {
    "the hour that comes twice in Berlin is two buckets": (
        *("PT1H", BERLIN, utc(2026, 10, 24, 23), 4),
        "01:00 25T01+02:00, 02:00 25T02+02:00, 02:00 25T02+01:00, 03:00 25T03+01:00",
    ),
    "the hour that comes twice in New York is two buckets": (
        *("PT1H", NEW_YORK, utc(2026, 11, 1, 4), 4),
        "00:00 01T00-04:00, 01:00 01T01-04:00, 01:00 01T01-05:00, 02:00 01T02-05:00",
    ),
    "the hour that is left out in Berlin has no bucket": (
        *("PT1H", BERLIN, utc(2026, 3, 29, 0), 3),
        "01:00 29T01+01:00, 03:00 29T03+02:00, 04:00 29T04+02:00",
    ),
    "the hour that is left out in New York has no bucket": (
        *("PT1H", NEW_YORK, utc(2026, 3, 8, 6), 2),
        "01:00 08T01-05:00, 03:00 08T03-04:00",
    ),
    "a quarter of the day in autumn is an hour longer": (
        *("PT6H", BERLIN, utc(2026, 10, 24, 22), 14),
        "00:00 25T00+02:00, 06:00 25T06+01:00, 12:00 25T12+01:00",
    ),
    "a quarter of the day in spring is an hour shorter": (
        *("PT6H", BERLIN, utc(2026, 3, 28, 23), 12),
        "00:00 29T00+01:00, 06:00 29T06+02:00, 12:00 29T12+02:00",
    ),
    "a bucket whose beginning is left out begins with the change": (
        *("PT2H", BERLIN, utc(2026, 3, 28, 23), 4),
        "00:00 29T00+01:00, 03:00 29T02+02:00, 04:00 29T04+02:00",
    ),
    "half an hour back on Lord Howe makes one hour longer": (
        *("PT1H", LORD_HOWE, utc(2026, 4, 4, 14), 3),
        "01:00 05T01+11:00, 02:00 05T02+10:30, 03:00 05T03+10:30",
    ),
    "the half hour that comes twice on Lord Howe is two buckets": (
        *("PT30M", LORD_HOWE, utc(2026, 4, 4, 14, 30), 1),
        "01:30 05T01:30+11:00, 01:30 05T01:30+10:30",
    ),
    "a clock set back into the middle of a bucket begins another": (
        *("PT20M", LORD_HOWE, utc(2026, 4, 4, 14, 20), 1),
        "01:20 05T01:20+11:00, 01:40 05T01:40+11:00, 01:30 05T01:20+10:30, 01:40 05T01:40+10:30",
    ),
    "a day of 25 hours is one day": (
        *("P1D", BERLIN, utc(2026, 10, 24, 22), 26),
        "00:00 25, 00:00 26",
    ),
    "a day of 23 hours is one day": (
        *("P1D", BERLIN, utc(2026, 3, 28, 23), 24),
        "00:00 29, 00:00 30",
    ),
}


@pytest.mark.parametrize(("period", "tz", "first", "hours", "walls"), CHANGES.values(), ids=CHANGES)
def test_buckets_begin_on_the_wall_when_clocks_are_changed(period, tz, first, hours, walls):
    month = f"{first.astimezone(ZoneInfo(tz)):%Y-%m-}"

    found = begins(period, tz, first, hours)

    assert ", ".join(f"{wall} {name.removeprefix(month)}" for wall, name in found) == walls


# -- laws ------------------------------------------------------------------------------------------

moments = st.datetimes(datetime(1971, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
minutes = st.sampled_from(MINUTES)
near = st.integers(-3 * 1440 * 60, 3 * 1440 * 60)


@given(moments, minutes, near)
def test_in_utc_same_name_if_and_only_if_same_aligned_interval(at, length, seconds):
    other = at + timedelta(seconds=seconds)
    epoch = utc(1970, 1, 1)

    def interval(moment: datetime) -> int:
        return (moment - epoch) // timedelta(minutes=length)

    same = time_bucket(f"PT{length}M", at) == time_bucket(f"PT{length}M", other)

    assert same == (interval(at) == interval(other))


@given(moments, st.integers(1, 60), near)
def test_several_days_are_one_aligned_interval(at, days, seconds):
    other = at + timedelta(seconds=seconds)

    def interval(moment: datetime) -> int:
        return (moment.date() - date(1, 1, 1)).days // days

    same = time_bucket(f"P{days}D", at) == time_bucket(f"P{days}D", other)

    assert same == (interval(at) == interval(other))


def intervals(tz: tzinfo, length: int, first: datetime, hours: int) -> list[int]:
    """The number of the bucket of every minute, told by watching the clock on the wall: one
    begins whenever it shows an aligned time, or is set so that it shows another bucket."""
    found: list[int] = []
    last = None
    for n in range(hours * 60):
        wall = (first + timedelta(minutes=n)).astimezone(tz)
        passed = wall.hour * 60 + wall.minute
        now = (wall.date(), passed // length)
        begun = last is not None and (now != last or passed % length == 0)
        found.append((found[-1] + begun) if found else 0)
        last = now
    return found


@settings(deadline=None, max_examples=int(os.environ.get("CELERY_UNIQUE_EXAMPLES", "120")) // 4)
@given(st.sampled_from(ZONES), minutes, st.dates(date(2015, 1, 1), date(2035, 1, 1)))
@example(BERLIN, 60, date(2026, 10, 25))
@example(BERLIN, 120, date(2026, 3, 29))
@example(NEW_YORK, 30, date(2026, 11, 1))
@example(LORD_HOWE, 20, date(2026, 4, 5))
@example(LORD_HOWE, 60, date(2026, 10, 4))
@example("America/Havana", 360, date(2026, 11, 1))
def test_in_any_zone_names_change_exactly_when_a_bucket_begins(tz, length, day):
    first = datetime(day.year, day.month, day.day, tzinfo=UTC) - timedelta(hours=12)
    hours = 36
    expected = intervals(ZoneInfo(tz), length, first, hours)
    names = [
        time_bucket(f"PT{length}M", first + timedelta(minutes=n), tz) for n in range(hours * 60)
    ]

    changes = [one != other for one, other in itertools.pairwise(names)]
    assert changes == [one != other for one, other in itertools.pairwise(expected)]
    # And a name never comes again.
    assert len(set(names)) == len(set(expected))


@given(moments, st.sampled_from(ZONES), st.sampled_from(["PT1M", "PT5M", "PT1H", "P1D", "P1M"]))
def test_names_never_depend_on_the_zone_of_the_moment(at, tz, period):
    assert time_bucket(period, at.astimezone(ZoneInfo(LORD_HOWE)), tz) == time_bucket(
        period, at, tz
    )
