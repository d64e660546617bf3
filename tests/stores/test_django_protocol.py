"""Histories against the plain model, on the cache and the database of a Django project."""

from __future__ import annotations

import pytest

from tests.stores.test_following_state_machine import FollowersAgainstModel
from tests.stores.test_state_machine import TIME_LIMIT, StoreAgainstModel, budget, check, told

pytestmark = TIME_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "share"), [(StoreAgainstModel, 1.0), (FollowersAgainstModel, 0.5)]
)
def test_the_store_answers_as_the_model_does(machine, share, django_store, request, report):
    kind = request.node.callspec.params["django_store"]

    figures = check(django_store, kind, budget(kind, share), machine)

    report(told(figures, f"{kind}, {machine.__name__}"))
