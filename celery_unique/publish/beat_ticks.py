"""``unique_beat``: a tick of a periodic entry is published once, however many beats run.

A tick is named by its entry and its nominal time, which beats whose clocks differ by seconds
compute alike: of a crontab the minute that was due, of an interval the bucket of that length. A
plain task is published as a unique call with that key. A task with a policy of its own keeps it:
its call is made by the beat that acquires the tick, a lock without a message.

Beats of one interval tick at the boundaries of its buckets. Celery counts an interval from the last
run, so that each beat would drift through the buckets, and leave one of them out now and then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from datetime import time as dt_time
from functools import cache
from typing import Any

from celery.schedules import crontab, schedstate, schedule
from celery.utils import uuid

from celery_unique import reporting
from celery_unique.config.app_state import STATE_ATTRIBUTE, AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.keys.digest import key_of
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.layers import take_call_options
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import STATES
from celery_unique.stores.base import Claim, Finish
from celery_unique.stores.record import State, letters, terminal_letters

from .coordinator import READ_AGAIN_AFTER_S, UniqueTaskCoordinator
from .request import SendTask, policy_of, registered
from .results import CallOutcome, with_facts

logger = logging.getLogger("celery_unique")

#: How long a tick is remembered beyond the next one of its entry: for beats that are late.
LATE = timedelta(minutes=10)
#: How far the clocks of beats may be apart.
SKEW_S = 5
#: How long a beat waits for another one that publishes a tick, 3 s in all: while it waits it comes
#: to no other tick. Less than SKEW_S, so that it leaves out none of a short interval.
PAUSES_S = (*READ_AGAIN_AFTER_S, *[0.1] * 29)
#: The days that are searched for the last time at which a crontab was due: 29 February.
MOST_DAYS = 8 * 366

_STATES = letters(STATES)
_HOOKED = "celery_unique_ticks"


@dataclass(frozen=True, slots=True)
class Tick:
    """One occurrence of a periodic entry."""

    entry: str
    nominal: int  # seconds since 1970
    remembered_for: timedelta

    def text(self, *_: Any, **__: Any) -> str:
        """What makes its key, whatever the arguments are."""
        return f"{self.entry}@{self.nominal}"

    def policy(self) -> UniquePolicy:
        return UniquePolicy(key=self.text, states="window", period=self.remembered_for)


#: The tick that this beat is publishing.
_current: ContextVar[Tick | None] = ContextVar("tick", default=None)


def publish_ticks_once(scheduler: type[Any]) -> None:
    """Make a class of schedulers publish each tick only if no other beat has, for apps that are
    set to ``unique_beat``."""
    defined_by = next(cls for cls in scheduler.__mro__ if "apply_async" in vars(cls))
    apply_async: Callable[..., Any] = defined_by.__dict__["apply_async"]
    if hasattr(apply_async, _HOOKED):
        return

    def apply_tick(
        self: Any, entry: Any, producer: Any = None, advance: bool = True, **options: Any
    ) -> Any:
        app_state = vars(self.app).get(STATE_ATTRIBUTE)
        if app_state is None or not app_state.settings.beat:
            return apply_async(self, entry, producer=producer, advance=advance, **options)
        align_intervals()
        if not hasattr(self.app.send_task, _HOOKED):
            self.app.send_task = _once(app_state, self.app.send_task)
        result, now = None, entry.schedule.now()
        try:
            # Published first: a beat that shares its entries with others, and is killed in between,
            # would have marked a tick as done that no beat publishes.
            for tick in ticks_of(entry):
                _current.set(tick)
                result = apply_async(self, entry, producer=producer, advance=False, **options)
            return result
        finally:
            _current.set(None)
            if advance:
                _record(self, entry, now)

    setattr(apply_tick, _HOOKED, True)
    defined_by.apply_async = apply_tick  # type: ignore[attr-defined]


def _record(scheduler: Any, entry: Any, now: datetime) -> None:
    """Advance the entry to the time at which its ticks were computed. Publishing may take until the
    next one: recorded as of then, that one would count as done, for all beats that share the
    record."""
    entry.schedule.now = lambda: now
    try:
        scheduler.reserve(entry)
    finally:
        del entry.schedule.now


def _once(app_state: AppState, send_task: SendTask) -> SendTask:
    """``app.send_task`` in a beat."""

    def send(name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        tick = _current.get()
        _current.set(None)
        if tick is None or more or not app_state.settings.enabled:
            return send_task(name, args, kwargs, *more, **options)
        task = options.get("task_type") or registered(app_state.app, name)
        own, _ = policy_of(app_state, name, task, take_call_options(dict(options)))
        try:
            if own is not None:
                return _Beside(app_state, tick, name).publish(
                    lambda: send_task(name, args, kwargs, **options)
                )
            return send_task(name, args, kwargs, **{**options, "unique": tick.policy()})
        except StoreUnavailable as error:
            # Beat would not try it again: a tick that is lost is worse than one too many.
            task_id = options.get("task_id") or uuid()
            reporting.publishing_unlocked(name, task_id, reason=str(error))
            sent = {**options, "task_id": task_id, "unique": False}
            return send_task(name, args, kwargs, **sent)

    setattr(send, _HOOKED, True)
    return send


class _Beside:
    """The lock of a tick whose task is unique by a policy of its own, beside that of the task."""

    def __init__(self, app_state: AppState, tick: Tick, name: str) -> None:
        self._app = app_state.app
        self._dry_run = app_state.settings.dry_run
        self._store = app_state.store
        self._leases = app_state.part(UniqueTaskCoordinator).leases
        self._tick, self._name = tick, name
        self._key = key_of(json.dumps({"beat": tick.text()}), app_state.settings.key_secret)

    def publish(self, send: Callable[[], Any]) -> Any:
        window_ms = milliseconds(self._tick.remembered_for)
        claim = Claim(
            task_id=uuid(),
            task_name=self._name,
            states=_STATES,
            grace_ms=self._leases.grace_ms,
            window_ms=window_ms,
            keep=terminal_letters(_STATES),
            keep_ms=window_ms,
        )
        acquired, again = self._store.acquire(self._key, claim), False
        while acquired.holder is not None and not self._dry_run:
            holder = acquired.holder
            if not self._is_abandoned(holder.task_id):
                logger.info("skipped tick of %s: another beat has published it", self._tick.entry)
                facts = CallOutcome("deduplicated", True, self._key, str(holder.state))
                return with_facts(self._app.AsyncResult(holder.task_id), facts)
            # Of the beats that have waited for it, one acquires it.
            self._store.give_back(self._key, holder.task_id, self._leases.grace_ms)
            acquired, again = self._store.acquire(self._key, claim), True
        if again:
            logger.warning(
                "publishing tick of %s again: the beat that acquired it has not recorded its "
                "publish",
                self._tick.entry,
            )
        task_id = claim.task_id if acquired.holder is None else acquired.holder.task_id
        try:
            result = send()
        except BaseException:
            self._store.give_back(self._key, task_id, self._leases.grace_ms)
            raise
        finish = Finish(task_id, "", State.COMPLETED, window_ms, self._leases.grace_ms)
        self._store.finish(self._key, finish)
        return result

    def _is_abandoned(self, holder: str) -> bool:
        """Whether the beat that acquired it does not publish it: it failed, or may have been
        killed. A slow one is waited for: where its task has ended already, the policy of the task
        would not find a second call."""
        for pause in PAUSES_S:
            record, _ = self._store.read(self._key)
            task = record.tasks.get(holder)
            if task is None:
                return True  # its publish failed
            if not task.pending:
                return False
            time.sleep(pause)
        return True


# -- nominal times ------------------------------------------------------------------------


def ticks_of(entry: Any) -> Iterator[Tick | None]:
    """The ticks of an entry that is due: one, and of a short interval also those since its last
    run.

    Beats that share their entries share the last run, too: one whose clock is ahead would skip the
    ticks of the seconds between.
    """
    last = tick_of(entry)
    seconds = getattr(entry.schedule, "seconds", 0)
    if last is not None and 1 <= seconds < SKEW_S and entry.last_run_at:
        since = _bucket(_aware(entry.schedule, entry.last_run_at), seconds).timestamp()
        nominal = max(since, last.nominal - SKEW_S // seconds * seconds)
        while (nominal := nominal + seconds) < last.nominal:
            yield Tick(last.entry, round(nominal), last.remembered_for)
    yield last


def tick_of(entry: Any) -> Tick | None:
    """The last tick of an entry that is due; None where its schedule does not say when it was."""
    every = entry.schedule
    now = _aware(every, every.now())
    if isinstance(every, crontab):
        due = last_due(every, now)
        next_in = _until_next(every, due)
    elif isinstance(every, schedule) and every.seconds >= 1:
        due = _bucket(now, every.seconds)
        next_in = every.run_every
    else:  # solar and others: the first event since the last run
        left = every.remaining_estimate(entry.last_run_at) if entry.last_run_at else None
        due = None if left is None else _rounded(now + left)
        next_in = timedelta(days=1)
    if due is None:
        return None
    return Tick(str(entry.name), round(due.timestamp()), next_in + LATE)


def last_due(every: crontab, now: datetime) -> datetime | None:
    """The last minute at which a crontab was due."""
    now = now.astimezone(every.tz).replace(second=0, microsecond=0)
    for back in range(MOST_DAYS):
        day = (now - timedelta(days=back)).date()
        on_day = (
            day.month in every.month_of_year
            and day.day in every.day_of_month
            and day.isoweekday() % 7 in every.day_of_week
        )
        if on_day:
            for hour, minute in _times_of_day(every):
                if back or (hour, minute) <= (now.hour, now.minute):
                    fold = now.fold if not back and hour == now.hour else 0
                    at = dt_time(hour, minute, tzinfo=now.tzinfo, fold=fold)
                    return datetime.combine(day, at)
    return None


def _until_next(every: crontab, due: datetime | None) -> timedelta:
    """From one time to the next: the same for every beat, whenever it comes to the tick."""
    if due is None:
        return timedelta()
    start, ends_in, _ = every.remaining_delta(due)
    until_next: timedelta = start + ends_in - due
    return max(timedelta(), until_next)


def _times_of_day(every: crontab) -> Iterator[tuple[int, int]]:
    """From the last to the first."""
    for hour in sorted(every.hour, reverse=True):
        for minute in sorted(every.minute, reverse=True):
            yield hour, minute


def _bucket(at: datetime, seconds: float) -> datetime:
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


def _rounded(at: datetime) -> datetime:
    return datetime.fromtimestamp(round(at.timestamp() / 60) * 60, UTC)


def _aware(every: Any, at: datetime) -> datetime:
    aware: datetime = every.maybe_make_aware(at)
    return aware


@cache
def align_intervals() -> None:
    """Make intervals due at the boundaries of their buckets, in the process of a beat."""
    estimate: Any = schedule.remaining_estimate
    is_due: Any = schedule.is_due

    def remaining_estimate(self: Any, last_run_at: datetime) -> Any:
        if self.seconds < 1:
            return estimate(self, last_run_at)
        after = _bucket(_aware(self, last_run_at), self.seconds) + self.run_every
        return after - _aware(self, self.now())

    def due(self: Any, last_run_at: datetime) -> Any:
        if self.seconds < 1:
            return is_due(self, last_run_at)
        left = remaining_estimate(self, last_run_at).total_seconds()
        if left > 0:
            return schedstate(is_due=False, next=left)
        now = _aware(self, self.now())
        after = _bucket(now, self.seconds) + self.run_every
        return schedstate(is_due=True, next=(after - now).total_seconds())

    schedule.remaining_estimate = remaining_estimate
    schedule.is_due = due
