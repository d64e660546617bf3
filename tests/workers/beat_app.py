"""The app of a beat in a process of its own: ``celery -A tests.workers.beat_app beat``.

Its configuration is in the environment, as JSON: the broker, the kind of beat, the schedule, and
how far its clock is ahead of the machine's and how fast it runs. (libfaketime does not work with
the condition variables of Python.)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import BaseSchedule, crontab
from celery.signals import beat_init

import celery_unique
from celery_unique.publish import beat_ticks

SETTINGS: dict[str, Any] = json.loads(os.environ["BEAT_APP"])

OFFSET_S = float(os.environ.get("BEAT_OFFSET_S", "0"))


def now_here(*_: Any) -> datetime:
    """The time by the clock of this beat."""
    now = time.time()
    return datetime.fromtimestamp(
        now + OFFSET_S + (now - SETTINGS["began"]) * (SETTINGS["speed"] - 1), UTC
    )


if "journal" in SETTINGS:

    @beat_init.connect(weak=False)
    def note_each_look(sender: Any, **_: Any) -> None:
        """Write down when this beat comes to its schedule, by its own clock."""
        looks = (Path(SETTINGS["journal"]) / f"looks-{os.getpid()}").open("a", buffering=1)
        tick = sender.scheduler.tick

        def noted(*args: Any, **kwargs: Any) -> Any:
            looks.write(f"{now_here().timestamp()}\n")
            return tick(*args, **kwargs)

        sender.scheduler.tick = noted


if "skips" in SETTINGS:
    ticks_of = beat_ticks.ticks_of

    def without_some(entry: Any) -> Iterator[Any]:
        """A beat that records every so manieth tick and does not publish it."""
        for tick in ticks_of(entry):
            if tick is None or tick.nominal % SETTINGS["skips"]:
                yield tick

    beat_ticks.ticks_of = without_some


if "slow_s" in SETTINGS and OFFSET_S > 0:
    from redbeat.schedulers import RedBeatScheduler

    reserve = RedBeatScheduler.reserve

    def reserve_late(self: Any, entry: Any) -> Any:
        """A beat that is slow between the publish of some ticks and their record."""
        if time.time() // 1 % 5 == 0:
            time.sleep(SETTINGS["slow_s"])
        return reserve(self, entry)

    RedBeatScheduler.reserve = reserve_late


if SETTINGS["speed"] > 1:
    # A minute lasts two seconds: a beat that waits for longer leaves one out.
    beat_ticks.PAUSES_S = tuple(pause / 3 for pause in beat_ticks.PAUSES_S)

if "journal" in SETTINGS:
    is_abandoned = beat_ticks._Beside._is_abandoned

    def note_if_abandoned(self: Any, holder: str) -> bool:
        """Write down the ticks of a task with a policy of its own that this beat takes over."""
        abandoned = is_abandoned(self, holder)
        if abandoned:
            with (Path(SETTINGS["journal"]) / f"abandoned-{os.getpid()}").open("a") as journal:
                journal.write(f"{self._tick.nominal}\n")
        return abandoned

    beat_ticks._Beside._is_abandoned = note_if_abandoned  # type: ignore[method-assign]

#: Entry name -> task.
ENTRIES = SETTINGS.get("entries") or {"every tick": "shop.plain", "its own policy": "shop.unique"}

if SETTINGS.get("django"):
    from django.conf import settings

    if not settings.configured:
        import django

        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.sqlite3",
                    "NAME": SETTINGS["django"],
                    "OPTIONS": {"timeout": 30},
                }
            },
            USE_TZ=True,
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        )
        django.setup()

    from django_celery_beat.schedulers import ModelEntry

    ModelEntry._default_now = now_here


def schedule_of(seconds: float | None) -> Any:
    return crontab() if seconds is None else seconds


BaseSchedule.now = now_here  # type: ignore[method-assign]
app = Celery("beats", broker=SETTINGS["broker"], backend=SETTINGS["broker"], set_as_current=True)
app.now = now_here
app.conf.update(
    beat_schedule={
        name: {"task": task, "schedule": schedule_of(SETTINGS["every_s"]), "args": (7,)}
        for name, task in ENTRIES.items()
    },
    task_default_queue="ticks",
    # A clock that runs fast is looked at often enough.
    beat_max_loop_interval=0.1,
    redbeat_redis_url=SETTINGS["broker"],
    redbeat_lock_key=None,
    redbeat_key_prefix="redbeat:",
    unique_beat=SETTINGS["unique_beat"],
    **SETTINGS.get("conf", {}),
)
celery_unique.install(app)

if "sentry" in SETTINGS:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    import celery_unique.contrib.sentry

    celery_unique.contrib.sentry.install(app)
    sentry_sdk.init(
        dsn=SETTINGS["sentry"], integrations=[CeleryIntegration(monitor_beat_tasks=True)]
    )


@app.task(name="shop.plain", ignore_result=True)
def plain(shop_id: int) -> None: ...


class WithTick(app.Task):  # type: ignore[misc,name-defined]
    """Its messages have a header with the tick that they are published for."""

    abstract = True

    def apply_async(self, *args: Any, headers: Any = None, **options: Any) -> Any:
        tick = beat_ticks._current.get()
        headers = {**(headers or {}), "tick": tick.nominal if tick is not None else None}
        return super().apply_async(*args, headers=headers, **options)


# Its window is shorter than a tick: it finds no duplicate among the ticks.
@app.task(
    name="shop.unique",
    base=WithTick,
    unique=True,
    unique_for=0.001,
    unique_states="until_done",
    ignore_result=True,
)
def unique(shop_id: int) -> None: ...


@app.task(name="shop.rebuild", unique=True, ignore_result=True)
def rebuild(shop_id: int) -> None: ...
