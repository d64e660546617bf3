"""The contract, and the race, on the cache and the database of a Django project."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from tests.stores.contract import LockStoreContract
from tests.stores.django_project import DjangoProject, django_acquire_racer
from tests.stores.racing import PROCESSES, Racers, overlap_of, wrong_rounds

URLS = [DjangoProject.cache_url, DjangoProject.database_url]
ROUNDS = 150

_namespaces = itertools.count()


@pytest.fixture(params=URLS)
def store(request: pytest.FixtureRequest, django_project: DjangoProject) -> Iterator[LockStore]:
    store = open_store(request.param, namespace=f"contract{next(_namespaces)}")
    yield store
    store.close()


class TestContract(LockStoreContract):
    """``store`` is the fixture above."""


@pytest.fixture(scope="module")
def racers() -> Iterator[Racers]:
    with Racers() as racers:
        yield racers


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", URLS)
def test_every_round_has_one_winner_whom_all_losers_name(
    django_project: DjangoProject,
    racers: Racers,
    url: str,
    report: Callable[[str], None],
) -> None:
    began = time.monotonic()

    rounds = racers.race(
        django_acquire_racer, django_project.settings, url, f"race {url}", rounds=ROUNDS
    )

    took_s = time.monotonic() - began
    wrong, overlap = wrong_rounds(rounds), overlap_of(rounds)
    report(
        f"race on {url}: {PROCESSES} processes, {len(rounds)} rounds, "
        f"{len(rounds) - len(wrong)} with one winner whom all others name; {overlap}; "
        f"{took_s:.1f} s"
    )
    assert wrong == []
    assert overlap.share >= 0.9
