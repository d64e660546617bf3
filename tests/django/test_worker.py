"""A worker of the project, started as Celery's guide shows: nothing in it names this library."""

from __future__ import annotations

from typing import Any

from tests.django.people import LIST, RELEASE, client_of, empty_store, staff, text_of
from tests.support import eventually


def call(door: str) -> dict[str, Any]:
    from tests.django.shop.tasks import hold_until_told

    first, again = hold_until_told.delay(door), hold_until_told.delay(door)
    return {"id": first.id, "again": again.id, "deduplicated": again.deduplicated}


def start_afresh() -> None:
    from tests.django.shop.celery import app

    empty_store()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("celery")


def state(door: str) -> str | None:
    from celery_unique import lookup
    from tests.django.shop.tasks import hold_until_told

    lock = lookup(hold_until_told, (door,))
    return None if lock is None else lock.state


def listed() -> str:
    from django.contrib.auth.models import User

    user, _ = User.objects.get_or_create(username="root", is_staff=True, is_superuser=True)
    return text_of(client_of(user).get(LIST))


def release(door: str) -> str:
    from celery_unique import lookup
    from tests.django.shop.tasks import hold_until_told

    lock = lookup(hold_until_told, (door,))
    assert lock is not None
    client = client_of(staff("view_lock", "release_lock"))
    form = {"lock": [f"{lock.key} {lock.task_id}"], "confirm": "yes"}
    return text_of(client.post(RELEASE, form, follow=True))


def outcome(task_id: str) -> tuple[str, str]:
    from django_celery_results.models import TaskResult

    row = TaskResult.objects.get(task_id=task_id)
    return row.status, row.result


def test_a_task_holds_its_key_until_the_worker_has_ended_it(
    django_process, shop_environment, start_worker, tmp_path
):
    inside = lambda name, **values: django_process.call(__name__, name, **values)  # noqa: E731
    door, other_door = tmp_path / "door", tmp_path / "other"
    inside("start_afresh")
    worker = start_worker("tests.django.shop", env=shop_environment, concurrency=2)

    called = inside("call", door=str(door))
    assert (called["again"], called["deduplicated"]) == (called["id"], True)
    eventually(lambda: inside("state", door=str(door)) == "active", timeout=30)
    page = inside("listed")
    assert called["id"] in page
    assert worker.hostname in page

    # Released manually, a second one may run beside it, and neither ends the other's lock.
    assert "Released 1 lock." in inside("release", door=str(door))
    beside = inside("call", door=str(door))
    assert beside["id"] != called["id"]

    elsewhere = inside("call", door=str(other_door))
    door.touch()
    other_door.touch()
    eventually(lambda: inside("state", door=str(door)) is None, timeout=30)
    eventually(lambda: inside("state", door=str(other_door)) is None, timeout=30)
    for task in (called, beside, elsewhere):
        eventually(
            lambda task=task: inside("outcome", task_id=task["id"])[0] == "SUCCESS", timeout=30
        )
    assert worker.stop(timeout=40) == 0
