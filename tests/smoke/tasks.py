"""The tasks of the smoke tests. Imported by the tests and, as a file of its own, by the worker."""

from celery import shared_task


@shared_task(name="smoke.add")
def add(x: int, y: int) -> int:
    return x + y


@shared_task(name="smoke.unique_add", unique=True)
def unique_add(x: int, y: int) -> int:
    return x + y


@shared_task(name="smoke.refuse", unique=True, unique_on_conflict="reject")
def refuse(x: int) -> int:
    if x < 0:
        raise ValueError(x)
    return x
