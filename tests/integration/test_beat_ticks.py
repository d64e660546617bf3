"""The nominal time of a tick, and what a beat does with it: on every store, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab, schedule, solar

from celery_unique import unique_conflict
from celery_unique.config.app_state import state_of
from celery_unique.publish import beat_ticks
from celery_unique.publish.beat_ticks import last_due, publish_ticks_once, tick_of
from tests.support import eventually
from tests.support.app import advance, define, flush, locks, make_app, messages, working

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)  # a Monday


class Beat:
    """A scheduler with a clock of its own."""

    def __init__(self, app: Celery, task: str = "shop.rebuild") -> None:
        self.app, self.task = app, task
        self.now = NOON
        self.scheduler = Scheduler(app, lazy=True)
        publish_ticks_once(Scheduler)

    def entry(self, every: Any, name: str = "rebuild", **fields: Any) -> ScheduleEntry:
        every.nowfun = lambda: self.now
        every._app = self.app
        last = fields.pop("last_run_at", self.now)
        return ScheduleEntry(
            name, self.task, last, schedule=every, args=(7,), app=self.app, **fields
        )

    def tick(self, every: Any, **fields: Any) -> Any:
        return self.scheduler.apply_async(self.entry(every, **fields), advance=False)


@pytest.fixture
def beat_app(app_with: Callable[..., Celery]) -> Celery:
    return app_with(unique_beat=True)


def beats(app: Celery, number: int = 3, seconds_apart: float = 2) -> list[Beat]:
    """Beats whose clocks are apart."""
    made = [Beat(app) for _ in range(number)]
    for n, beat in enumerate(made):
        beat.now += timedelta(seconds=n * seconds_apart)
    return made


@pytest.mark.parametrize("every", [crontab(), schedule(600)], ids=["crontab", "interval"])
def test_beats_with_clocks_apart_publish_a_tick_once(beat_app: Celery, every: Any) -> None:
    define(beat_app)
    made = beats(beat_app)

    first = [beat.tick(every) for beat in made]
    flush(beat_app)
    for beat in made:
        beat.now += timedelta(minutes=10)
    second = [beat.tick(every) for beat in made]

    assert [each.outcome for each in first] == ["created", "deduplicated", "deduplicated"]
    assert [each.outcome for each in second] == ["created", "deduplicated", "deduplicated"]
    assert [sent.id for sent in messages(beat_app)] == [first[0].id, second[0].id]


def test_entries_of_one_task_tick_each(beat_app: Celery) -> None:
    define(beat_app)
    [one, other] = beats(beat_app, 2)

    names = ["rebuild", "rebuild too"]
    results = [beat.tick(crontab(), name=name) for name in names for beat in (one, other)]

    assert [each.outcome for each in results] == ["created", "deduplicated"] * 2


def test_a_tick_composes_with_the_policy_of_its_task(beat_app: Celery) -> None:
    define(beat_app, unique=True)
    made = beats(beat_app)

    first = [beat.tick(crontab()) for beat in made]
    for beat in made:
        beat.now += timedelta(minutes=1)
    second = [beat.tick(crontab()) for beat in made]

    # The first task still waits, so the next tick is a duplicate of it by its own policy.
    assert [each.outcome for each in first] == ["created", "deduplicated", "deduplicated"]
    assert [each.outcome for each in second] == ["deduplicated"] * 3
    assert second[0].id == first[0].id
    assert [sent.id for sent in messages(beat_app)] == [first[0].id]


def test_a_beat_that_died_before_it_published_loses_no_tick(
    beat_app: Celery, monkeypatch: Any, caplog: Any
) -> None:
    define(beat_app, unique=True)
    [dead, other] = beats(beat_app, 2)
    monkeypatch.setattr(beat_ticks, "PAUSES_S", (0.01,))
    kill_before_it_publishes(dead, monkeypatch)

    assert messages(beat_app) == []
    for _ in range(2):
        other.tick(crontab())
        assert len(messages(beat_app)) == 1
    assert times_published_again(caplog) == 1


def test_one_of_the_beats_that_wait_for_a_dead_one_publishes_its_tick(
    beat_app: Celery, monkeypatch: Any, caplog: Any
) -> None:
    # Its window is over at once: it would not find a second call.
    define(beat_app, unique=True, unique_for=0.001, unique_states="until_done")
    [dead, one, other] = beats(beat_app, 3)
    kill_before_it_publishes(dead, monkeypatch)
    outcomes: list[str] = []

    def while_it_waits(_: float) -> None:
        monkeypatch.setattr(beat_ticks, "time", SimpleNamespace(sleep=lambda _: None))
        outcomes.append(one.tick(crontab()).outcome)

    monkeypatch.setattr(beat_ticks, "PAUSES_S", (0.01,))
    monkeypatch.setattr(beat_ticks, "time", SimpleNamespace(sleep=while_it_waits))
    outcomes.append(other.tick(crontab()).outcome)

    assert outcomes == ["created", "deduplicated"]
    assert len(messages(beat_app)) == 1
    assert times_published_again(caplog) == 1


def test_a_beat_waits_for_another_one_that_publishes_slowly(
    beat_app: Celery, monkeypatch: Any
) -> None:
    """Its message has arrived, and the task has ended: the policy would not find a second call."""
    define(beat_app, unique=True)
    [slow, other] = beats(beat_app, 2)
    has_arrived, may_return = threading.Event(), threading.Event()
    send_message = beat_app.amqp.send_task_message
    results: list[Any] = []
    waited: list[float] = []

    def send_slowly(*args: Any, **kwargs: Any) -> Any:
        sent = send_message(*args, **kwargs)
        has_arrived.set()
        assert may_return.wait(30)
        return sent

    monkeypatch.setattr(beat_app.amqp, "send_task_message", send_slowly)
    publisher = threading.Thread(target=lambda: results.append(slow.tick(crontab())))
    publisher.start()
    assert has_arrived.wait(30)
    monkeypatch.setattr(beat_app.amqp, "send_task_message", send_message)
    with working(beat_app):
        eventually(lambda: not locks_of_tasks(beat_app))

    def pass_time(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) > 2 and publisher.is_alive():
            may_return.set()
            publisher.join(30)

    monkeypatch.setattr(beat_ticks, "time", SimpleNamespace(sleep=pass_time))
    result = other.tick(crontab())
    may_return.set()
    publisher.join(30)

    assert (results[0].outcome, result.outcome) == ("created", "deduplicated")
    assert sum(waited) > 2
    assert messages(beat_app) == []


def kill_before_it_publishes(beat: Beat, monkeypatch: Any) -> None:
    store = state_of(beat.app).store

    class Killed(BaseException):
        """As SIGKILL: nothing else runs."""

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(type(beat.app.amqp), "send_task_message", killed)
        patch.setattr(type(store), "give_back", lambda *_, **__: None)
        with pytest.raises(Killed):
            beat.tick(crontab())


def times_published_again(caplog: Any) -> int:
    again = "publishing tick of rebuild again: the beat that acquired it has not recorded"
    return [again in record.getMessage() for record in caplog.records].count(True)


def locks_of_tasks(app: Celery) -> list[str]:
    """The ids of the tasks that have not ended."""
    flush(app)
    records = [record for _, record in state_of(app).store.walk()]
    return [i for each in records for i, task in each.tasks.items() if task.running or task.waiting]


def test_a_tick_is_published_while_the_store_is_down() -> None:
    app = make_app("redis://localhost:1/0", unique_beat=True, unique_store_timeout=0.2)
    for name, options in (("shop.plain", {}), ("shop.unique", {"unique": True})):
        define(app, name, **options)
        assert Beat(app, name).tick(crontab()).outcome == "bypassed"

    assert [sent.task for sent in messages(app)] == ["shop.plain", "shop.unique"]


def test_the_switches_of_a_rollout_hold_for_ticks(beat_app: Celery) -> None:
    app = beat_app
    define(app)
    define(app, "shop.unique", unique=True)
    conflicts: list[Any] = []

    def note(**facts: Any) -> None:
        conflicts.append(facts["sender"])

    unique_conflict.connect(note)
    app.conf.unique_dry_run = True
    for name in ("shop.rebuild", "shop.unique"):
        for _ in range(2):
            Beat(app, name).tick(crontab(), name=name)
    assert len(messages(app)) == 4
    app.conf.unique_enabled = False
    Beat(app).tick(crontab())

    assert len(messages(app)) == 5
    assert conflicts == ["shop.rebuild", "shop.unique"]


def test_without_the_setting_a_scheduler_is_celerys_own(local_app: Celery) -> None:
    define(local_app)

    results = [beat.tick(crontab()) for beat in beats(local_app)]

    assert [each.outcome for each in results] == ["bypassed"] * 3
    assert locks(local_app) == []


def test_ticks_are_remembered_until_the_next_one(beat_app: Celery) -> None:
    define(beat_app)
    [beat] = beats(beat_app, 1)
    daily = crontab(minute="0", hour="12")
    beat.tick(daily)
    flush(beat_app)
    advance(beat_app, 23 * 3600)
    beat.now += timedelta(hours=23)

    assert beat.tick(daily).outcome == "deduplicated"


# -- nominal times --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "now", "due"),
    [
        (crontab(), NOON + timedelta(seconds=59.9), NOON),
        (crontab(minute="*/15"), NOON + timedelta(minutes=14, seconds=59), NOON),
        (crontab(minute="30", hour="8"), NOON, NOON.replace(hour=8, minute=30)),
        (crontab(minute="30", hour="18"), NOON, datetime(2026, 3, 1, 18, 30, tzinfo=UTC)),
        (crontab("0", "0", day_of_week="fri"), NOON, datetime(2026, 2, 27, tzinfo=UTC)),
        (crontab("0", "0", day_of_week="sun"), NOON, datetime(2026, 3, 1, tzinfo=UTC)),
        (crontab("5", "4", day_of_month="31"), NOON, datetime(2026, 1, 31, 4, 5, tzinfo=UTC)),
        (
            crontab("0", "0", day_of_month="29", month_of_year="2"),
            NOON,
            datetime(2024, 2, 29, tzinfo=UTC),
        ),
    ],
)
def test_the_last_time_at_which_a_crontab_was_due(
    local_app: Celery, every: crontab, now: datetime, due: datetime
) -> None:
    every._app = local_app

    assert last_due(every, now) == due


def test_a_crontab_is_due_in_its_own_time_zone(local_app: Celery) -> None:
    local_app.conf.timezone = "Europe/Berlin"
    every = crontab(minute="0", hour="9", app=local_app)

    assert last_due(every, NOON) == datetime(2026, 3, 2, 9, tzinfo=ZoneInfo("Europe/Berlin"))


def test_an_hour_that_is_repeated_has_two_ticks(local_app: Celery) -> None:
    local_app.conf.timezone = "Europe/Berlin"
    every = crontab(minute="30", app=local_app)
    first = datetime(2026, 10, 25, 0, 40, tzinfo=UTC)  # 2:40 in summer, an hour later in winter

    due = [last_due(every, first + timedelta(hours=n)) for n in (0, 1)]

    assert due[0] is not None
    assert due[1] is not None
    assert due[1].timestamp() - due[0].timestamp() == 3600


def test_events_of_the_sun_have_a_nominal_time(local_app: Celery) -> None:
    beat = Beat(local_app)
    sunset = solar("sunset", 52.5, 13.4)
    entry = beat.entry(sunset, last_run_at=NOON)
    beat.now = NOON + timedelta(hours=8)
    one = tick_of(entry)
    beat.now += timedelta(seconds=2)

    assert one is not None
    assert tick_of(entry) == one
