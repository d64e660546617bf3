"""Tests of lock stores: one contract and one model for every store."""

import pytest

# Its assertions are explained as those of a test module are.
pytest.register_assert_rewrite("tests.stores.side_by_side")
