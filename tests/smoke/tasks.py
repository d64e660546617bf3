"""The tasks of the smoke tests. Imported by the tests and, as a file of its own, by the worker."""

import time

from celery import shared_task


@shared_task(name="smoke.add")
def add(x: int, y: int) -> int:
    return x + y


@shared_task(name="smoke.hold", unique=True)
def hold(x: int, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return x


@shared_task(name="smoke.refuse", unique=True, unique_on_conflict="reject")
def refuse(x: int, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    if x < 0:
        raise ValueError(x)
    return x
