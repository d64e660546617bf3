"""The contract on the cache and the database of a Django project; the race is in test_races."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from tests.stores.contract import LockStoreContract
from tests.stores.django_project import DjangoProject

URLS = [DjangoProject.cache_url, DjangoProject.database_url]

_namespaces = itertools.count()


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest, django_project: DjangoProject) -> Iterator[LockStore]:
    store = open_store(request.param, namespace=f"contract{next(_namespaces)}")
    yield store
    store.close()


class TestContract(LockStoreContract):
    """``store`` is the fixture above."""
