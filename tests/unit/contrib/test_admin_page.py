"""What the admin's pages say of a duration."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_unique.contrib.django.admin_page import _elided, brief


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (-5, "0 s"),
        (59.6, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (90_061, "1 d 1 h"),
        (86_400 * 30, "30 d"),
    ],
)
def test_a_duration_is_its_two_largest_units(seconds: float, shown: str) -> None:
    assert brief(timedelta(seconds=seconds), 2) == shown
    assert brief(timedelta(seconds=seconds), 1) == " ".join(shown.split()[:2])


@pytest.mark.parametrize(
    ("present", "last", "shown"),
    [
        (1, 1, [1]),
        (2, 5, [1, 2, 3, 4, 5]),
        (10, 20, [1, 2, None, 8, 9, 10, 11, 12, None, 19, 20]),
        (20, 20, [1, 2, None, 18, 19, 20]),
    ],
)
def test_far_pages_are_left_out(present: int, last: int, shown: list[int | None]) -> None:
    assert list(_elided(present, last)) == shown
