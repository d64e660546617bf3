"""The state of one app: settings, store, leases, policies.

Everything is made on first use, so that ``install`` opens no connection, and kept on the app
itself, so that two apps of one process never mix.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, Self, TypeVar

from celery_unique import reporting
from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.policy.task_options import TaskPolicies
from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.diagnosis import IDENTITY_NAMESPACE, identity_in
from celery_unique.stores.failover import REMEMBERED, FailOver, FailOvers
from celery_unique.stores.memory import MemoryStore

from .leases import Leases
from .settings import UniqueSettings, read_settings, warn_unknown_settings
from .store_url import store_url

STATE_ATTRIBUTE = "_celery_unique"

MOST_JOINED = 10_000

Part = TypeVar("Part", bound="BuiltOnState")


class BuiltOnState(Protocol):
    """An object that :meth:`AppState.part` keeps: a coordinator, a worker's lock client."""

    @classmethod
    def of(cls, app_state: AppState) -> Self: ...

    def flush(self) -> None: ...


class AppState:
    """Settings, store, leases and policies of one app."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.policies = TaskPolicies()
        #: Of the worker in this process; None where there is none.
        self.renewal: Any = None
        self._mutex = threading.RLock()
        self._seen_conf: dict[str, Any] | None = None
        self._settings = UniqueSettings()
        #: With rpc:// a result reaches only the caller that its message names.
        self.results_by_message = False
        self.sends_sent_events = False  # task_send_sent_event
        self._store: LockStore | None = None
        self._gate_store: LockStore | None = None
        #: Replaces the store of the settings.
        self._instead: LockStore | None = None
        self._store_watchers: list[Callable[[LockStore], None]] = []
        self._part_watchers: list[Callable[[Any], None]] = []
        self._store_made_from: tuple[Any, ...] = ()
        #: The last walk of the store for the keys of ids: when, how long (seconds), and the result.
        self.found_keys: tuple[float, float, dict[str, str]] = (-math.inf, 0.0, {})
        self._leases: Leases | None = None
        #: By class, as ``part`` has made them; empty again after a change of the settings. For
        #: each message of a worker, which does not look for such a change: its renewals do.
        self.parts: dict[type, Any] = {}
        #: Tasks that calls of this process follow.
        self.joined: BoundedDict[str, None] = BoundedDict(MOST_JOINED)
        #: The newest that this process noticed.
        self.failovers: deque[FailOver] = deque(maxlen=REMEMBERED)
        #: In a worker: notes that the message of a request waits there.
        self.register_waiting: Callable[[Any], None] | None = None
        #: Runs jobs in a worker's thread, so that its main loop need not wait.
        self.background: Callable[[Callable[[], object]], bool] | None = None

    def in_background(self, job: Callable[[], object]) -> None:
        """Run ``job`` in a worker's thread, or here where there is none."""
        if self.background is None or not self.background(job):
            job()

    def remember_joined(self, holder_id: str) -> None:
        """Note that a call of this process follows that task, which may also run here."""
        self.joined.remember(holder_id, None)

    @property
    def settings(self) -> UniqueSettings:
        """The settings, read again after a change of the app's configuration."""
        changes = self.app.conf.changes
        if changes != self._seen_conf:
            self._read_settings()
        return self._settings

    def _read_settings(self) -> None:
        with self._mutex:
            settings = read_settings(self.app)
            warn_unknown_settings(self.app)
            if settings != self._settings:
                self._settings = settings
                reporting.switches(enabled=settings.enabled, dry_run=settings.dry_run)
            self._leases = None
            self.parts.clear()
            # Every call needs these, and Celery looks up a setting in several places.
            self.results_by_message = str(self.app.conf.result_backend or "").startswith("rpc")
            self.sends_sent_events = bool(self.app.conf.task_send_sent_event)
            self._seen_conf = dict(self.app.conf.changes)

    @property
    def store(self) -> LockStore:
        """The lock store. Raises ConfigurationError where none is configured."""
        if self._instead is not None:
            return self._instead
        made_from = self._what_makes_the_store()
        with self._mutex:
            if self._store is None or made_from != self._store_made_from:
                self._close_stores()
                self._store = self._open(self.settings.store_timeout)
                self._store_made_from = made_from
            return self._store

    @property
    def gate_store(self) -> LockStore:
        """The same store with a shorter timeout, for the main loop of a worker."""
        store = self.store
        if self._instead is not None:
            return self._instead
        with self._mutex:
            if self._gate_store is None:
                in_process = isinstance(store, MemoryStore)
                self._gate_store = store if in_process else self._open(self.settings.gate_timeout)
            return self._gate_store

    def _open(self, timeout: timedelta) -> LockStore:
        url, options = store_url(self.app, self.settings)
        store = open_store(
            url,
            namespace=self.settings.namespace,
            timeout_s=timeout.total_seconds(),
            **options,
        )
        failovers: FailOvers | None = getattr(store, "failovers", None)
        if failovers is not None:
            failovers.tell = self._failed_over
        for watch in self._store_watchers:
            watch(store)
        return store

    def store_identity(self) -> str:
        """The id that the store keeps: the same by every address that leads to it. Not cached: a
        store that lost its data has another one. Takes a connection and a round trip or two."""
        store = self.store
        if isinstance(store, MemoryStore):
            return store.identity
        url, options = store_url(self.app, self.settings)
        timeout_s = self.settings.store_timeout.total_seconds()
        kept = open_store(url, namespace=IDENTITY_NAMESPACE, timeout_s=timeout_s, **options)
        try:
            return identity_in(kept)
        finally:
            kept.close()

    def _failed_over(self, failover: FailOver) -> None:
        """Report it once, although the store and the gate's store both notice it."""
        last = self.failovers[-1] if self.failovers else None
        if last is None or (last.before, last.after) != (failover.before, failover.after):
            self.failovers.append(failover)
            reporting.failed_over(self.app, failover)

    def watch_stores(self, watch: Callable[[LockStore], None]) -> None:
        """Call ``watch`` with every store of this app, open now or later."""
        with self._mutex:
            self._store_watchers.append(watch)
            for store in {id(each): each for each in (self._store, self._gate_store)}.values():
                if store is not None:
                    watch(store)

    def _what_makes_the_store(self) -> tuple[Any, ...]:
        settings = self.settings
        url, options = store_url(self.app, settings)
        return (url, options, settings.namespace, settings.store_timeout, settings.gate_timeout)

    def flush(self) -> None:
        """Wait until everything queued for the store and for monitors is sent, if it can be."""
        for store in (self._store, self._gate_store, self._instead):
            if store is not None:
                with suppress(StoreUnavailable):
                    store.flush()
        for part in list(self.parts.values()):
            part.flush()

    def _close_stores(self) -> None:
        for store in (self._store, self._gate_store):
            if store is not None:
                store.close()
        self._store = self._gate_store = None

    @property
    def leases(self) -> Leases:
        settings = self.settings  # first: a change of it forgets the leases
        leases = self._leases
        if leases is None:
            leases = self._leases = Leases.of(settings, self.app.conf)
        return leases

    def part(self, kind: type[Part]) -> Part:
        """The one object of this class, made by ``kind.of`` on first use and again after a change
        of the settings."""
        _ = self.settings  # first: a change of it forgets the parts
        part = self.parts.get(kind)
        if part is None:
            with self._mutex:
                part = kind.of(self)
                for watch in self._part_watchers:
                    watch(part)
                self.parts[kind] = part
        return part

    def watch_parts(self, watch: Callable[[Any], None]) -> None:
        """Call ``watch`` with every part of this app, made already or later."""
        with self._mutex:
            self._part_watchers.append(watch)
            for part in list(self.parts.values()):
                watch(part)

    def is_guarded(self, name: str, task: Any) -> bool:
        """Whether a worker guards the messages of this task that have no key."""
        settings = self.settings
        guard, defaults = settings.guard, settings.app_defaults
        return settings.enabled and self.policies.is_guarded(name, task, guard, defaults)

    def use_store(self, store: LockStore | None) -> LockStore | None:
        """Replace the store of the settings, or use it again (None). Returns the earlier
        replacement. For tests that move the clock."""
        with self._mutex:
            before, self._instead = self._instead, store
            if store is not None:
                for watch in self._store_watchers:
                    watch(store)
            self.parts.clear()
        return before


def make_state(app: Any) -> AppState:
    """The state of an app, made on the first call."""
    app_state = app.__dict__.get(STATE_ATTRIBUTE)
    if app_state is None:
        app_state = app.__dict__[STATE_ATTRIBUTE] = AppState(app)
    return app_state  # type: ignore[no-any-return]


def is_installed(app: Any) -> bool:
    return STATE_ATTRIBUTE in app.__dict__


def state_of(app: Any) -> AppState:
    """The state of an installed app."""
    app_state = app.__dict__.get(STATE_ATTRIBUTE)
    if app_state is None:
        raise ConfigurationError(
            "celery_unique is not installed in this Celery app: call celery_unique.install(app) "
            "where the app is made.",
            setting=None,
        )
    return app_state  # type: ignore[no-any-return]
