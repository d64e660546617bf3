"""The contract on every store of this package, and on stores that break it."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_unique.testing.store_contract import LockStoreContract
from celery_unique.testing.store_contract.factories import Key, fresh_key
from tests.stores import broken, broken_following, broken_lanes, broken_merging, broken_replacing


class TestContract(LockStoreContract):
    """``store`` is the parametrised fixture of conftest.py."""


def test_no_test_of_the_contract_hides_another():
    names = Counter(
        name
        for part in LockStoreContract.__mro__
        for name in vars(part)
        if name.startswith("test_")
    )

    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(("store", "test"), broken.CAUGHT_BY)
def test_the_contract_catches_a_store_that_leaves_a_rule_out(store, test):
    with pytest.raises(AssertionError):
        test(LockStoreContract(), key=Key(store(), fresh_key()))


def test_every_broken_store_is_caught_by_the_contract():
    stores = {
        *broken.every_broken_store(),
        *broken_following.every_broken_store(),
        *broken_replacing.every_broken_store(),
        *broken_lanes.every_broken_store(),
        *broken_merging.every_broken_store(),
    }

    assert {parameters.values[0] for parameters in broken.CAUGHT_BY} == stores
