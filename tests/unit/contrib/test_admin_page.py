"""The links to the pages of the admin's list."""

from __future__ import annotations

import pytest

from celery_unique.contrib.django.admin_page import _elided


@pytest.mark.parametrize(
    ("present", "last", "shown"),
    [
        (1, 1, [1]),
        (2, 5, [1, 2, 3, 4, 5]),
        (10, 20, [1, 2, None, 8, 9, 10, 11, 12, None, 19, 20]),
        (20, 20, [1, 2, None, 18, 19, 20]),
    ],
)
def test_far_pages_are_left_out(present, last, shown):
    assert list(_elided(present, last)) == shown
