"""The backend of Django's Tasks framework, with a broker, a worker and the lock store."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.django.inside import inside_django
from tests.django.people import empty_store
from tests.support import eventually


def _empty() -> None:
    from tests.django.shop.celery import app

    empty_store()
    with app.connection_for_write() as connection:
        for queue in ("celery", "slow"):
            connection.default_channel.queue_purge(queue)


def _messages(queue: str = "celery") -> int:
    from tests.django.shop.celery import app

    with app.connection_for_write() as connection:
        return int(connection.default_channel.client.llen(queue))


@inside_django
def test_a_second_call_is_not_enqueued_and_has_the_id_of_the_first():
    from tests.django.shop.background import plain, reindex

    _empty()
    first = reindex.enqueue(7)
    again = reindex.enqueue(shop_id=7, full=True)
    other = reindex.enqueue(8)

    assert (first.outcome, first.deduplicated) == ("created", False)
    assert (again.id, again.outcome, again.deduplicated) == (first.id, "deduplicated", True)
    assert other.id != first.id
    assert _messages() == 2
    assert plain.enqueue(1).id != plain.enqueue(1).id
    assert _messages() == 4


@inside_django
def test_the_lock_has_the_name_of_the_task():
    from celery_unique import lookup
    from tests.django.shop.background import reindex

    _empty()
    first = reindex.enqueue(7)

    lock = lookup("tests.django.shop.background.reindex", (7,))
    assert lock is not None
    assert (lock.task_id, lock.task_name) == (first.id, reindex.module_path)


@inside_django
def test_options_come_from_the_backend_the_task_and_the_call():
    from celery_unique import DuplicateTask, lookup
    from tests.django.shop.background import digest, digest_again, pay, plain

    _empty()
    assert digest.enqueue(1).id == digest.enqueue(1).id
    assert lookup("tests.django.shop.background.digest", (1,)).window_ends_at is not None
    digest_again.enqueue(1)
    assert lookup("tests.django.shop.background.digest_again", (1,)).window_ends_at is None
    pay.enqueue(1)
    with pytest.raises(DuplicateTask):
        pay.enqueue(1)
    keyed = [plain.get_backend().enqueue(plain, (n,), {}, idempotency_key="k") for n in (1, 1)]
    assert keyed[0].id == keyed[1].id


@inside_django
def test_queue_and_run_after():
    from datetime import timedelta

    from django.utils import timezone

    from celery_unique import lookup
    from tests.django.shop.background import reindex, wait

    _empty()
    wait.enqueue(1)
    assert (_messages("slow"), _messages()) == (1, 0)
    later = timezone.now() + timedelta(hours=1)
    reindex.using(run_after=later).enqueue(9)
    lock = lookup("tests.django.shop.background.reindex", (9,))
    assert lock.state == "scheduled"
    assert abs(lock.eta - later) < timedelta(seconds=1)


@inside_django
def test_what_is_wrong_is_said_where_it_is_written():
    from django.core.exceptions import ImproperlyConfigured
    from django.test import override_settings

    from celery_unique.contrib.django.task_backend import CeleryBackend, unique
    from tests.django.shop.background import plain, reindex

    with pytest.raises(ImproperlyConfigured, match="Did you mean 'unique_for'"):
        unique(unique_fo=7)
    with pytest.raises(ImproperlyConfigured, match=r"TASKS\['x'\]\['OPTIONS'\]: 'uniqe'"):
        CeleryBackend("x", {"OPTIONS": {"uniqe": True}})
    assert list(CeleryBackend("x", {}).check()) == []
    with override_settings(INSTALLED_APPS=[]):
        [found] = CeleryBackend("x", {}).check()
    assert found.id == "celery_unique.E005"
    with pytest.raises(TypeError):
        plain.enqueue(object())
    with pytest.raises(Exception, match="priority"):
        reindex.using(priority=5)


@inside_django
def test_options_of_the_task_decorator():
    import inspect

    from celery_unique.contrib.django import task_backend
    from tests.django.shop import background

    if "kwargs" not in inspect.signature(background.task).parameters:
        return  # before Django 6.1, @task has no room for them: @unique has

    def made(shop_id: int) -> None: ...

    made.__qualname__ = "made"
    vars(background)["made"] = background.task(unique=True, unique_for=60)(made)
    try:
        first, again = background.made.enqueue(1), background.made.enqueue(shop_id=1)
        assert first.id == again.id
        assert getattr(made, task_backend._ATTRIBUTE) == {"unique": True, "unique_for": 60}
    finally:
        del background.made


@inside_django
def test_signals_tell_of_what_was_enqueued_alone():
    from celery_unique.contrib.django.task_backend import signals
    from tests.django.shop.background import reindex

    _empty()
    heard: list[str] = []

    def hear(sender: Any, task_result: Any, **_: Any) -> None:
        heard.append(task_result.id)

    signals.task_enqueued.connect(hear)
    try:
        first, _ = reindex.enqueue(7), reindex.enqueue(7)
    finally:
        signals.task_enqueued.disconnect(hear)
    assert heard == [first.id]


# -- with a worker ---------------------------------------------------------------------


def enqueue_some() -> dict[str, str]:
    from tests.django.shop.background import pay, reindex, told, wait

    _empty()
    return {
        "reindex": reindex.enqueue(7, full=True).id,
        "pay": pay.enqueue(3).id,
        "told": told.enqueue(5).id,
        "wait": wait.enqueue(6).id,
    }


def status(task: str, task_id: str) -> tuple[str, Any, list[str]]:
    from tests.django.shop import background

    result = getattr(background, task).get_result(task_id)
    value = result.return_value if result.status == "SUCCESSFUL" else None
    return str(result.status.value), value, [e.exception_class.__name__ for e in result.errors]


def refreshed() -> list[Any]:
    """A result refreshed until it has ended, in the process that made it."""
    import asyncio

    from tests.django.shop.background import reindex

    result = reindex.enqueue(11)
    before = str(result.status.value)
    eventually(lambda: (result.refresh(), result.is_finished)[1], timeout=60)
    asyncio.run(result.arefresh())
    return [before, result.return_value, result.finished_at is not None, len(result.worker_ids)]


def ended_while_it_was_looked_for() -> bool:
    """The task ends after its result was looked for and before its lock is."""
    from unittest import mock

    from celery.app.task import Context

    from celery_unique.contrib.django.celery_app import project_app
    from tests.django.shop.background import reindex

    _empty()
    app, task_id = project_app(), str(uuid.uuid4())
    look = app.backend.get_task_meta

    def end_afterwards(looked_for: str) -> Any:
        found = look(looked_for, cache=False)
        request = Context(id=task_id, task=reindex.module_path, args=(), kwargs={})
        app.backend.store_result(task_id, {"shop": 1}, "SUCCESS", request=request)
        return found

    with mock.patch.object(app.backend, "get_task_meta", side_effect=end_afterwards):
        return reindex.get_result(task_id).id == task_id


def test_a_result_is_found_whose_task_ends_while_it_is_looked_for(django_process):
    assert django_process.call(__name__, "ended_while_it_was_looked_for")


def wrong_results(task_id: str) -> list[str]:
    from tests.django.shop.background import plain

    wrong = []
    for each in (task_id, "no-such-id"):
        try:
            plain.get_result(each)
        except Exception as error:
            wrong.append(type(error).__name__)
    return wrong


def test_a_worker_runs_them_and_their_results_are_found_by_id(
    django_process, shop_environment, start_worker
):
    inside = lambda name, **values: django_process.call(__name__, name, **values)  # noqa: E731
    ids = inside("enqueue_some")
    assert inside("status", task="reindex", task_id=ids["reindex"]) == ("READY", None, [])

    start_worker(
        "tests.django.shop", env=shop_environment, concurrency=1, queues=("celery", "slow")
    )

    def ended(name: str, expected: tuple[str, Any, list[str]]) -> None:
        eventually(
            lambda: inside("status", task=name, task_id=ids[name]) == expected,
            timeout=60,
            message=f"{name}: {inside('status', task=name, task_id=ids[name])}",
        )

    ended("reindex", ("SUCCESSFUL", {"shop": 7, "full": True}, []))
    ended("pay", ("FAILED", None, ["ValueError"]))
    ended("told", ("SUCCESSFUL", [ids["told"], 1, 5], []))
    ended("wait", ("SUCCESSFUL", 6, []))
    assert inside("refreshed") == ["READY", {"shop": 11, "full": False}, True, 1]
    assert inside("wrong_results", task_id=ids["reindex"]) == [
        "TaskResultMismatch",
        "TaskResultDoesNotExist",
    ]
