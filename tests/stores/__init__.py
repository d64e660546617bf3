"""Tests of lock stores: one contract, one model, one set of schedules for every store."""

import pytest

# Their assertions are explained as those of a test module are.
pytest.register_assert_rewrite(
    "tests.stores.contract", "tests.stores.factories", "tests.stores.side_by_side"
)
