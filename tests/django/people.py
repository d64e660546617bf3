"""Called inside the project: users, their sessions, and locks to look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    fresh_key,
    start,
)

LIST = "/admin/celery_unique/lock/"
RELEASE = f"{LIST}release/"

_numbers = itertools.count()


def staff(*permissions: str) -> Any:
    """A user who may log in to the admin, with these permissions of ours."""
    from django.contrib.auth.models import Permission, User

    user = User.objects.create_user(f"staff{next(_numbers)}", is_staff=True)
    for codename in permissions:
        found = Permission.objects.get(content_type__app_label="celery_unique", codename=codename)
        user.user_permissions.add(found)
    return user


def client_of(user: Any, *, forged: bool = False) -> Any:
    """A browser in which the user has logged in. Forged: it checks the token of every form."""
    from django.test import Client

    client = Client(enforce_csrf_checks=forged)
    client.force_login(user)
    return client


def session_of(permissions: Sequence[str]) -> str:
    """The cookie of a new user's session, for a browser outside."""
    return str(client_of(staff(*permissions)).cookies["sessionid"].value)


def store() -> Any:
    from celery_unique.config.app_state import state_of
    from celery_unique.contrib.django.celery_app import project_app

    return state_of(project_app()).store


@contextmanager
def another_store(url: str) -> Iterator[None]:
    """The project with its locks elsewhere, for a while."""
    from tests.django.shop.celery import app

    app.conf.unique_store_url = url
    try:
        yield
    finally:
        del app.conf.changes["unique_store_url"]


def empty_store() -> None:
    """Tests share the project and so its locks."""
    from django.core.cache import cache

    cache.clear()


def hold(name: str, task_id: str, *, active: str = "", duplicates: int = 0, **fields: Any) -> str:
    """A lock of this task name; ``active`` is the worker that runs it. The key."""
    from dataclasses import replace

    key = fresh_key()
    mine = replace(claim(task_id, grace_ms=30 * MINUTE, **fields), task_name=name)
    store().acquire(key, mine)
    store().confirm(key, task_id, QUEUE_LEASE)
    store().flush()
    for first in range(0, duplicates, 1000):
        numbers = range(first, min(first + 1000, duplicates))
        store().acquire_many([(key, replace(mine, task_id=f"duplicate{n}")) for n in numbers])
    if active:
        store().start(key, replace(start(task_id, f"{active}/1/2/3"), task_name=name))
    created = store().read(key)[0].tasks[task_id].created_at
    while store().read(key)[1] == created:  # the next one is younger: lists are sorted by age
        pass
    return key


def text_of(response: Any) -> str:
    return str(response.content.decode())


def result_of(task_id: str, *, task_args: str, task_kwargs: str) -> int:
    """A stored result as the backend of django-celery-results writes it. Its primary key."""
    from django_celery_results.models import TaskResult

    row = TaskResult.objects.create(
        task_id=task_id, task_name="shop.rebuild", task_args=task_args, task_kwargs=task_kwargs
    )
    return int(row.pk)


def hold_one() -> None:
    empty_store()
    hold("shop.rebuild", "the-only-one")


def hold_long_names() -> None:
    """Names as long as projects have them."""
    empty_store()
    hold(
        "warehouse.replenishment.tasks.recalculate_reorder_points_for_supplier",
        "5f0c1e7a-92b4-4d1c-8a3e-000000000001",
        active="celery@prod-eu-central-1-worker-high-priority-7d9f8b6c5-x2x4z",
        duplicates=123_456,
        window_ms=24 * 60 * MINUTE,
    )


def hold_ended() -> str:
    """A task that has ended and keeps its key for its window. The key."""
    from celery_unique.testing.store_contract.factories import finish

    empty_store()
    key = hold("shop.digest", "ended", active="celery@box", window_ms=60 * MINUTE, keep="c")
    store().finish(key, finish("ended", "celery@box/1/2/3"))
    return key


def hold_what_a_shop_has() -> dict[str, str]:
    """Locks as they are in a shop, for a picture. The keys by task id."""
    empty_store()
    keys = {}
    for number, (name, worker, duplicates, fields) in enumerate(
        (
            ("shop.tasks.rebuild_index", "celery@web1", 9, {}),
            ("shop.tasks.send_digest", "", 3, {"window_ms": 10 * MINUTE}),
            ("shop.tasks.confirm_order", "celery@web2", 1, {}),
            ("shop.tasks.sync_stock", "", 0, {"delay_ms": 5 * MINUTE}),
            ("shop.tasks.nightly_report", "celery@web1", 0, {"window_ms": 24 * 60 * MINUTE}),
        )
    ):
        task_id = f"5f0c1e7a-92b4-4d1c-8a3e-{number:012x}"
        keys[task_id] = hold(name, task_id, active=worker, duplicates=duplicates, **fields)
    return keys


def hold_html(text: str) -> str:
    empty_store()
    key = hold(text, f"id {text}", active=f"celery@{text.replace('/', '')}")
    result_of(f"id {text}", task_args=f"\"('{text}',)\"", task_kwargs='"{}"')
    return key


def is_released(key: str, task_id: str) -> bool:
    return bool(store().read(key)[0].tasks[task_id].released)


def superuser_session() -> str:
    from django.contrib.auth.models import User

    user = User.objects.create_superuser(f"root{next(_numbers)}")
    return str(client_of(user).cookies["sessionid"].value)
