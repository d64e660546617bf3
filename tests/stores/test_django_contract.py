"""The contract on the cache and the database of a Django project; the race is in test_races."""

from __future__ import annotations

import pytest

from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract import LockStoreContract


@pytest.fixture
def store(django_store: LockStore) -> LockStore:
    return django_store


class TestContract(LockStoreContract):
    """``store`` is the fixture above."""
