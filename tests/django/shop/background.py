"""Tasks of Django's own framework."""

from __future__ import annotations

from typing import Any

from celery_unique.contrib.django.task_backend import unique

try:
    from django.tasks import task
except ImportError:  # Django 5.2
    from django_tasks import task


@task
@unique(unique_on="shop_id")
def reindex(shop_id: int, full: bool = False) -> dict[str, Any]:
    return {"shop": shop_id, "full": full}


@task
def plain(number: int) -> int:
    return number


@task
@unique(unique_on_conflict="reject")
def pay(order: int) -> int:
    raise ValueError(f"order {order} has no price")


@task(takes_context=True)
@unique()
def told(context: Any, number: int) -> list[Any]:
    return [context.task_result.id, context.attempt, number]


@task(queue_name="slow")
@unique()
async def wait(number: int) -> int:
    return number


@task(backend="windowed")
def digest(user_id: int) -> int:
    return user_id


@task(backend="windowed")
@unique(unique_states="until_done", unique_for=None)
def digest_again(user_id: int) -> int:
    return user_id
