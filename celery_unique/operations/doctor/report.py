"""Examines store, workers and locks for ``celery unique doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.keys.digest import KEY_VERSION
from celery_unique.operations.explain import is_abandoned
from celery_unique.publish.atomic import why_two_steps
from celery_unique.publish.stale_holders.lock_view import LockView, StoreClock, locks_of
from celery_unique.publish.stale_holders.lost_messages import (
    Unproven,
    may_be_lost,
    missing_messages,
)
from celery_unique.publish.stale_holders.workers import (
    DEFAULT_TIMEOUT_S,
    BrokerUnavailable,
    NoAnswer,
    Workers,
    query_workers,
    store_identities_of_workers,
)
from celery_unique.stores.diagnosis import Diagnosis, Finding, Level
from celery_unique.stores.record import Record

from . import checks, failovers
from .failovers import SeenFailOver, failovers_seen
from .followers import Followed, no_followers_yet

#: Locks that are named in a finding; the others are counted.
NAMED = 3
#: Waiting locks whose message is looked for.
MOST_INSPECTED = 2000


@dataclass(slots=True)
class Report:
    facts: dict[str, str] = field(default_factory=dict)
    servers: dict[str, dict[str, str]] = field(default_factory=dict)  # name -> facts
    failovers: list[SeenFailOver] = field(default_factory=list)
    followed: Followed | None = None  # None: the locks could not be read
    passed: dict[str, str] = field(default_factory=dict)  # check -> what is right
    findings: list[Finding] = field(default_factory=list)
    workers: Workers = field(default_factory=Workers)
    store_answers: bool = False

    def of_level(self, *levels: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level in levels]

    def add(self, check: str, right: str, findings: Iterable[Finding]) -> None:
        found = list(findings)
        self.findings += found
        if not any(finding.level != "note" for finding in found):
            self.passed[check] = right


def examine(app_state: AppState, timeout_s: float = DEFAULT_TIMEOUT_S) -> Report:
    """Run every check, with queries to the store, the broker and the workers."""
    report = Report()
    report.findings += checks.switches(app_state.settings)
    report.findings += checks.untested_versions()
    clock, diagnosis = _examine_store(app_state, report)
    try:
        report.workers = query_workers(app_state.app, timeout_s)
    except BrokerUnavailable as error:
        report.findings.append(
            Finding("broker", "error", str(error), "without it no worker can be queried")
        )
    else:
        _examine_workers(app_state, report, diagnosis, timeout_s)
        if clock is not None:
            report.findings += checks.worker_clocks(report.workers, clock.skew_ms)
    report.failovers = failovers_seen(app_state, report.workers)
    report.findings += failovers.findings(report.failovers)
    if report.store_answers:
        _examine_locks(app_state, report, timeout_s)
    return report


def _examine_store(app_state: AppState, report: Report) -> tuple[StoreClock | None, Diagnosis]:
    store = app_state.store
    report.facts["guarantee"] = store.guarantee
    report.facts["fingerprint"] = store.fingerprint()
    why = why_two_steps(app_state.app, app_state.settings, store)
    report.facts["publish"] = f"two steps: {why}" if why else "one act"
    report.facts["namespace"] = app_state.settings.namespace or "(none)"
    try:
        store.ping()
        clock = StoreClock(app_state)
        diagnose: Any = getattr(store, "diagnose", Diagnosis)
        diagnosis: Diagnosis = diagnose()
    except StoreUnavailable as error:
        report.findings.append(
            Finding("store", "error", str(error), "until then calls fail, or are not unique")
        )
        return None, Diagnosis()
    report.store_answers = True
    with suppress(StoreUnavailable):  # a replica, or no rights: a finding of its own, or no matter
        report.facts["identity"] = app_state.store_identity()
    report.facts |= diagnosis.facts
    report.servers = diagnosis.servers
    report.passed["store"] = f"the lock store answers in {clock.round_trip_ms:.1f} ms"
    report.add(
        "clock",
        f"its clock and this machine's are {abs(clock.skew_ms):.0f} ms apart",
        checks.clock(clock.skew_ms, clock.round_trip_ms),
    )
    report.add("server", _set_up(diagnosis), diagnosis.findings)
    return clock, diagnosis


def _set_up(diagnosis: Diagnosis) -> str:
    number = len(diagnosis.servers)
    return f"{f'all {number} servers are' if number > 1 else 'the server is'} set up for locks"


def _examine_workers(
    app_state: AppState, report: Report, diagnosis: Diagnosis, timeout_s: float
) -> None:
    workers = report.workers
    count = f"{len(workers.replies)} of {len(workers.names)} workers"
    if workers.unreachable:
        report.findings += checks.presence(workers, timeout_s)
    else:
        report.add("workers", f"{count} replied", checks.presence(workers, timeout_s))
    report.add("reach", "the processes can share this store", checks.reach(workers, diagnosis))
    if not workers.replies:
        return
    fingerprint, namespace = app_state.store.fingerprint(), app_state.settings.namespace
    report.add(
        "same store",
        f"{count} use this store and namespace",
        checks.same_store(
            workers, fingerprint, namespace, _proven_same(app_state, report, timeout_s)
        ),
    )
    report.add("versions", f"{count} make the same keys as here", checks.same_versions(workers))
    report.add("renewing", f"{count} renew their leases", checks.renewing(workers))


def _proven_same(app_state: AppState, report: Report, timeout_s: float) -> set[str]:
    """The workers with another fingerprint whose store keeps the same id."""
    replies, store = report.workers.replies, app_state.store
    identity = report.facts.get("identity")
    others = [
        name for name in replies if replies[name].get("store") not in (None, store.fingerprint())
    ]
    if not others or identity is None:
        return set()
    try:
        found = store_identities_of_workers(app_state.app, others, timeout_s)
    except BrokerUnavailable:
        return set()
    return {name for name in others if found.get(name) == identity}


# -- locks -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walk:
    """Result of one walk over all locks, in bounded memory: examples and counts."""

    followed: Followed
    locks: int = 0
    abandoned: list[LockView] = field(default_factory=list)
    abandoned_in_all: int = 0
    waiting: list[LockView] = field(default_factory=list)
    waiting_in_all: int = 0
    other_versions: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    unreadable_in_all: int = 0

    def see_record(self, key: str, record: Record, now: int) -> None:
        if record.unreadable:
            self.unreadable_in_all += 1
            if len(self.unreadable) < NAMED:
                self.unreadable.append(record.unreadable)
            return
        if record.following is not None:
            self.followed.see(record.following, now)
        for lock in locks_of(key, record, now):
            self.see(lock)

    def see(self, lock: LockView) -> None:
        self.locks += 1
        version = lock.key.partition(":")[0]
        if version != KEY_VERSION:
            self.other_versions[version[:10]] += 1
        if is_abandoned(lock):
            self.abandoned_in_all += 1
            if len(self.abandoned) < NAMED:
                self.abandoned.append(lock)
        elif may_be_lost(lock):
            self.waiting_in_all += 1
            if len(self.waiting) < MOST_INSPECTED:
                self.waiting.append(lock)


def _examine_locks(app_state: AppState, report: Report, timeout_s: float) -> None:
    walk = _Walk(no_followers_yet(app_state, report.workers))
    try:
        clock = StoreClock(app_state)
        for key, record in app_state.store.walk():
            walk.see_record(key, record, clock.now())
        report.followed = walk.followed
        report.add("abandoned", "no task has lost its worker", _abandoned(walk))
        report.add("keys", f"all {walk.locks} locks have keys of this version", _versions(walk))
        report.add("records", "every record can be read", _unreadable(walk))
        report.add("followers", walk.followed.right(), walk.followed.findings())
        _examine_messages(app_state, report, walk, timeout_s)
    except StoreUnavailable as error:
        report.findings.append(Finding("store", "error", str(error)))


def _unreadable(walk: _Walk) -> Iterator[Finding]:
    if walk.unreadable_in_all:
        text = f"{walk.unreadable_in_all} records cannot be read. {walk.unreadable[0]}"
        cure = "celery -A APP unique release --state unreadable"
        yield Finding("records", "error", text, cure)


def _abandoned(walk: _Walk) -> Iterator[Finding]:
    if walk.abandoned_in_all:
        yield Finding(
            "abandoned",
            "warning",
            f"{walk.abandoned_in_all} tasks are recorded as running, and their workers have not "
            f"renewed their delivery leases: {_named(walk.abandoned)}",
            "with acks_late the broker delivers such a message again (Redis: after the visibility "
            "timeout), and it runs; if its message is known to be lost, free the key: "
            "celery -A APP unique release --task-id ID",
        )


def _versions(walk: _Walk) -> Iterator[Finding]:
    for version, count in sorted(walk.other_versions.items()):
        yield Finding(
            "key-version",
            "warning",
            f"{count} locks have keys of version {version!r}, of another release; this one "
            f"makes version {KEY_VERSION} and does not see them",
            "once no process of that release runs, they lapse with their leases",
        )


def _examine_messages(app_state: AppState, report: Report, walk: _Walk, timeout_s: float) -> None:
    if "broker" in {finding.check for finding in report.findings} or not report.workers.names:
        return  # reported already; without workers all tasks wait, and that is no error
    try:
        missing = list(missing_messages(app_state, walk.waiting, timeout_s, report.workers))
        ended = [each.lock for each in missing if each.ended]
        lost = list((unproven := Unproven()).proven(each for each in missing if not each.ended))
    except NoAnswer as error:
        report.findings.append(Finding("lost", "note", str(error)))
        return
    report.findings += _unproven(unproven)
    report.findings += _ended(ended)
    report.add(
        "lost", f"no {_inspected(walk)} is known to have lost its message", _lost(walk, lost)
    )


def _ended(locks: list[LockView]) -> Iterator[Finding]:
    if locks:
        yield Finding(
            "ended",
            "warning",
            f"{len(locks)} tasks wait by their records and have ended by the result backend (a "
            "worker without this library ran them, or a release was lost): "
            f"{_named(locks[:NAMED])}",
            "the next call of each releases its key, if the task has waited for longer than "
            "unique_check_after; or free them now: celery -A APP unique release --lost",
        )


def _inspected(walk: _Walk) -> str:
    if walk.waiting_in_all == len(walk.waiting):
        return "waiting task"
    return f"task of {len(walk.waiting)} that were inspected, of {walk.waiting_in_all} that wait,"


def _lost(walk: _Walk, lost: list[LockView]) -> Iterator[Finding]:
    if not lost:
        return
    who = f"{len(lost)} tasks wait,"
    if walk.waiting_in_all > len(walk.waiting):
        who = (
            f"{len(lost)} of {len(walk.waiting)} tasks that were inspected, of "
            f"{walk.waiting_in_all} that wait, do so,"
        )
    yield Finding(
        "lost",
        "warning",
        f"{who} and neither the broker nor a worker has their message "
        f"(a purged queue, or a broker that lost it): {_named(lost[:NAMED])}",
        "free their keys: celery -A APP unique release --lost",
    )


def _unproven(unproven: Unproven) -> Iterator[Finding]:
    for locks, reason in unproven.in_words():
        who = "1 waiting task" if locks == 1 else f"{locks} waiting tasks"
        yield Finding("lost", "note", f"the message of {who} was not found: {reason}")


def _named(locks: list[LockView]) -> str:
    named = [
        f"{lock.entry.task_name}[{lock.task_id}]" + (f" on {lock.worker}" if lock.worker else "")
        for lock in locks
    ]
    return ", ".join(named)
