"""Tasks of the kinds that projects have."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task
from celery.contrib.django.task import DjangoTask

from .celery import app


@shared_task(unique=True)
def rebuild_index(shop_id: int, full: bool = False) -> int:
    return shop_id


@app.task(unique=True, unique_for="PT10M", unique_states="window")
def send_digest(user_id: int) -> int:
    return user_id


class Audited(DjangoTask):
    """A base class of the project's own on Celery's for Django."""

    abstract = True
    calls = 0

    def label(self) -> str:
        return f"audited {self.name}"

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().apply_async(*args, **kwargs)


@app.task(base=Audited, bind=True, unique=True)
def audited(self: Task, shop_id: int) -> str:
    return self.label()  # type: ignore[no-any-return]


@shared_task
def plain(number: int) -> int:
    return number


@shared_task(unique=True, unique_on="shop_id")
def confirm_order(shop_id: int, transaction: int) -> int:
    """Equal by its shop; the other argument names the transaction that published it."""
    return transaction


@shared_task(bind=True, unique=True)
def hold_until_told(self: Task, door: str) -> str:
    """Runs until the file is there, so that a test sees it run."""
    import time
    from pathlib import Path

    deadline = time.monotonic() + 60
    while not Path(door).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return str(self.request.unique.token)
