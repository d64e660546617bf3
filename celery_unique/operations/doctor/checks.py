"""The checks of the doctor: each yields findings, with the cure."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Callable, Container, Iterator, Mapping
from importlib import metadata
from typing import Any

from celery_unique import __version__
from celery_unique.config.settings import UniqueSettings
from celery_unique.keys.digest import KEY_VERSION
from celery_unique.publish.stale_holders.workers import Workers
from celery_unique.stores.diagnosis import Diagnosis, Finding

#: Clocks that differ by less do no harm. The reply of a worker is a moment old.
SKEW_MS = 1000
WORKER_SKEW_MS = 5000
#: Rounds of renewing that may be late on a busy machine.
LATE_ROUNDS = 2.5

RESTART = "look at its log, and restart it"

#: Package -> the oldest and the newest version that the tests have run with: those of
#: docs/reference/compatibility.md, as tests/docs/test_release_files.py checks.
TESTED = {
    "celery": ("5.5", "5.7"),
    "redis": ("5.3", "8"),
    "SQLAlchemy": ("2.0", "2.1"),
    "Django": ("5.2", "6.1"),
}

#: Celery -> the versions of Python on which its tests have run, of that page.
PYTHONS = {
    "5.5": ("3.11", "3.13"),
    "5.6": ("3.11",),
    "5.7": ("3.11", "3.12", "3.13", "3.14"),
}


def untested_versions(
    installed: Callable[[str], str] = metadata.version, python: str = platform.python_version()
) -> Iterator[Finding]:
    for package, (oldest, newest) in TESTED.items():
        try:
            version = installed(package)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(version) < _numbers(oldest) or (
            _numbers(version)[: newest.count(".") + 1] > _numbers(newest)
        ):
            yield Finding(
                "untested",
                "note",
                f"{package} {version} is installed; the tests run with {oldest} to {newest}",
                "run the tests of your own project, and read the changelog of both",
            )

    try:
        celery = installed("celery")
    except metadata.PackageNotFoundError:
        return
    pythons = PYTHONS.get(".".join(celery.split(".")[:2]))
    if pythons and _numbers(python)[:2] not in map(_numbers, pythons):
        yield Finding(
            "untested",
            "note",
            f"Celery {celery} runs on Python {python}; its tests run on {', '.join(pythons)}",
            "use a version of both that the compatibility page lists",
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def switches(settings: UniqueSettings) -> Iterator[Finding]:
    if not settings.enabled:
        yield Finding(
            "switches",
            "warning",
            "unique_enabled is False: calls of this app are published without locks",
            "remove the setting once calls shall be unique again",
        )
    elif settings.dry_run:
        yield Finding(
            "switches",
            "warning",
            "unique_dry_run is True: duplicates are published anyway",
            "remove the setting once duplicates shall be skipped",
        )


def clock(skew_ms: float, round_trip_ms: float) -> Iterator[Finding]:
    if abs(skew_ms) <= SKEW_MS + round_trip_ms / 2:
        return
    yield Finding(
        "clock",
        "warning",
        f"this machine's clock is {_apart(skew_ms)} of the lock store's: an ETA and an expiry "
        "follow the caller's clock, leases and windows the store's",
        "synchronise both clocks with NTP",
    )


def worker_clocks(workers: Workers, skew_ms: float) -> Iterator[Finding]:
    for name, reply in sorted(workers.replies.items()):
        ahead = reply.get("clock_ms", 0) - (workers.replied_at_ms.get(name, 0) - skew_ms)
        if abs(ahead) > WORKER_SKEW_MS:
            yield Finding(
                "clock",
                "warning",
                f"the clock of worker {name} is {_apart(ahead)} of the lock store's",
                "synchronise both clocks with NTP",
            )


def _apart(ms: float) -> str:
    return f"{abs(ms) / 1000:.1f} s {'ahead' if ms > 0 else 'behind'}"


def presence(workers: Workers, timeout_s: float) -> Iterator[Finding]:
    if workers.unreachable:
        yield Finding("workers", "note", f"{workers.unreachable}, so workers are not checked")
    elif not workers.names:
        yield Finding(
            "workers",
            "warning",
            f"no worker replied within {timeout_s:g} s, so workers are not checked",
            "start one, or give busy ones more time with --timeout",
        )
    for name in workers.silent:
        yield Finding(
            "workers",
            "warning",
            f"worker {name} is running and did not report what it holds within {timeout_s:g} s",
            "try again with a longer --timeout",
        )
    for name in workers.without:
        yield Finding(
            "plugin",
            "error",
            f"worker {name} runs without this library: it runs unique tasks without their locks, "
            "renews no lease and releases no key",
            "install celery-unique-tasks there, call celery_unique.install(app), restart it",
        )


def same_store(
    workers: Workers, fingerprint: str, namespace: str, proven: Container[str] = ()
) -> Iterator[Finding]:
    """``proven``: workers whose store is this one, whatever its fingerprint there."""
    for name, reply in sorted(workers.replies.items()):
        if reply.get("store") is None:
            yield Finding(
                "store",
                "error",
                f"worker {name} has no lock store: {reply.get('store_error', '')}",
                "give it the unique_store_url that this process has",
            )
        elif reply.get("namespace") != namespace:
            yield Finding(
                "namespace",
                "error",
                f"worker {name} has the namespace {reply.get('namespace')!r} and this process "
                f"{namespace!r}: each releases keys that the other never acquired",
                "give both the same unique_namespace",
            )
        elif reply["store"] != fingerprint and name in proven:
            yield Finding(
                "store", "note", f"worker {name} reaches this lock store by another address"
            )
        elif reply["store"] != fingerprint:
            yield Finding(
                "store",
                "error",
                f"worker {name} uses another lock store (fingerprint {reply['store']}, here "
                f"{fingerprint}): it does not find the locks of this one, and never releases "
                "the keys that are acquired here",
                "give both the same unique_store_url",
            )


def same_versions(workers: Workers) -> Iterator[Finding]:
    for name, reply in sorted(workers.replies.items()):
        if reply.get("key_version") != KEY_VERSION:
            yield Finding(
                "key-version",
                "error",
                f"worker {name} makes keys of version {reply.get('key_version')} and this process "
                f"of version {KEY_VERSION}: equal calls of both have different keys",
                "run the same release of celery-unique-tasks everywhere",
            )
        elif reply.get("library") != __version__:
            yield Finding(
                "version",
                "note",
                f"worker {name} runs release {reply.get('library')}, this process {__version__}",
                "update the older one; workers first",
            )


def renewing(workers: Workers) -> Iterator[Finding]:
    for name, reply in sorted(workers.replies.items()):
        problem = _renewal_problem(reply.get("renewal"))
        if problem:
            yield Finding(
                "renewing",
                "error",
                f"worker {name} does not renew the leases of what it holds: {problem}. The locks "
                "of its tasks lapse while they run",
                "check that this worker reaches the lock store; " + RESTART,
            )


def _renewal_problem(renewal: Mapping[str, Any] | None) -> str:
    if renewal is None:
        return "its renewing thread was not started"
    if renewal["failures_in_a_row"]:
        return f"the last {renewal['failures_in_a_row']} rounds failed ({renewal['last_error']})"
    last = renewal["last_round_s_ago"]
    idle_s = renewal["running_for_s"] if last is None else last
    if idle_s > LATE_ROUNDS * renewal["every_s"] + 1:
        return f"the last round was {idle_s:g} s ago, and one is due every {renewal['every_s']:g} s"
    return ""


def reach(workers: Workers, diagnosis: Diagnosis) -> Iterator[Finding]:
    """Whether the running processes can share such a store at all."""
    if diagnosis.reach == "process":
        yield _memory_store(workers)
    elif diagnosis.reach == "machine":
        hosts = {reply.get("host") for reply in workers.replies.values()} | {socket.gethostname()}
        if len(hosts) > 1:
            yield Finding(
                "reach",
                "error",
                f"the locks are in a file, and processes run on {len(hosts)} machines "
                f"({', '.join(sorted(map(str, hosts)))}): each machine has locks of its own, or "
                "shares the file over a network, where SQLite's locking does not hold",
                "use Redis or PostgreSQL (unique_store_url)",
            )


def _memory_store(workers: Workers) -> Finding:
    if not workers.names:
        return Finding(
            "reach",
            "note",
            "the locks are in the memory of this process, and no other process sees them",
        )
    return Finding(
        "reach",
        "error",
        "the locks are in memory (memory://), and there are several processes: "
        f"{len(workers.names)} workers replied, and each has locks of its own",
        "use a store that processes share: redis://, postgresql+psycopg:// or sqlite:/// "
        "(unique_store_url)",
    )
