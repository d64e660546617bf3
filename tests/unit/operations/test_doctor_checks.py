"""What the doctor makes of what it was told, where no server has to be wrong for it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from platform import python_version
from typing import Any

import celery
import pytest

from celery_unique.operations.doctor import checks
from celery_unique.publish.stale_holders.workers import Workers
from celery_unique.stores.diagnosis import Diagnosis
from celery_unique.stores.redis.diagnosis import diagnosis_of
from celery_unique.stores.sql.diagnosis import _findings
from celery_unique.worker.renewal import RenewalHealth
from tests.workers.matrix import VERSIONS

INFO = {
    "redis_version": "7.0.15",
    "role": "master",
    "aof_enabled": "1",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
}


def redis_findings(save: Any = (b"save", b""), **info: str) -> list[tuple[str, str]]:
    lines = "".join(f"{name}:{value}\r\n" for name, value in {**INFO, **info}.items())
    found = diagnosis_of([f"# Server\r\n{lines}".encode(), save]).findings
    assert all(finding.cure for finding in found)
    return [(finding.check, finding.level) for finding in found]


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({}, []),
        ({"redis_version": "6.0.9"}, [("version", "error")]),
        ({"redis_version": "6.2.0"}, []),
        ({"redis_version": "unknown"}, []),
        ({"role": "slave"}, [("role", "error")]),
        ({"maxmemory_policy": "volatile-lru"}, [("eviction", "warning")]),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": "9"}, [("eviction", "error")]),
        ({"aof_enabled": "0"}, [("persistence", "warning")]),
        ({"aof_enabled": "0", "save": (b"save", b"3600 1")}, [("persistence", "note")]),
        ({"aof_enabled": "0", "save": PermissionError("NOPERM")}, []),
        ({"save": PermissionError("NOPERM")}, []),
    ],
)
def test_redis(info, found):
    assert redis_findings(**info) == found


def test_a_redis_that_may_not_be_asked_is_a_note():
    [finding] = diagnosis_of([PermissionError("NOPERM"), PermissionError("NOPERM")]).findings

    assert (finding.check, finding.level) == ("rights", "note")
    assert "INFO" in finding.cure


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, []),
        ({"role": "standby"}, ["role"]),
        ({"fsync": "off"}, ["persistence"]),
        ({"synchronous_commit": "off"}, ["persistence"]),
    ],
)
def test_postgresql(facts, found):
    well = {"role": "primary", "fsync": "on", "synchronous_commit": "on"}

    assert [finding.check for finding in _findings({**well, **facts})] == found


def told(**facts: Any) -> Workers:
    renewal = RenewalHealth(every_s=20).as_document()
    return Workers(replies={"w@h": {"renewal": renewal, "host": "h", **facts}})


def renewal(**facts: Any) -> dict[str, Any]:
    return {**RenewalHealth(every_s=20).as_document(), **facts}


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (renewal(), ""),
        (renewal(last_round_s_ago=45.0), ""),
        (renewal(last_round_s_ago=60.0), "the last round was 60 s ago"),
        (renewal(running_for_s=100.0), "the last round was 100 s ago"),
        (renewal(failures_in_a_row=3, last_error="no route"), "3 rounds failed (no route)"),
        (None, "was not started"),
    ],
)
def test_renewing(health, said):
    found = list(checks.renewing(told(renewal=health)))

    assert [said in finding.message for finding in found] == ([True] if said else [])


def test_the_health_of_renewing_is_told_in_seconds_that_passed():
    health = RenewalHealth(every_s=20)
    health.round_failed(RuntimeError("no route"))
    health.round_failed(RuntimeError())
    failing = health.as_document()
    health.round_ended(3)
    well = health.as_document()
    health.round_ended(0)

    assert failing["failures_in_a_row"] == 2
    assert failing["last_error"] == "RuntimeError"
    assert failing["last_round_s_ago"] is None
    assert (well["failures_in_a_row"], well["leases_renewed"]) == (0, 3)
    assert well["last_renewal_s_ago"] == 0
    assert health.as_document()["leases_renewed"] == 3


@pytest.mark.parametrize(
    ("skew_ms", "round_trip_ms", "found"),
    [(0, 1, 0), (900, 1, 0), (-1100, 1, 1), (1100, 1, 1), (1100, 400, 0)],
)
def test_clock(skew_ms, round_trip_ms, found):
    assert len(list(checks.clock(skew_ms, round_trip_ms))) == found


def test_the_clock_of_a_worker_is_compared_with_the_stores():
    workers = told(clock_ms=1_000_000)
    workers.replied_at_ms["w@h"] = 1_090_000  # here, where the clock is 90 s ahead

    assert not list(checks.worker_clocks(workers, skew_ms=90_000))
    [finding] = checks.worker_clocks(workers, skew_ms=0)
    assert "90.0 s behind" in finding.message


def test_a_file_on_two_machines_is_found():
    import socket

    here = Diagnosis("machine")

    assert not list(checks.reach(told(host=socket.gethostname()), here))
    [finding] = checks.reach(told(host="elsewhere"), here)
    assert (finding.check, finding.level) == ("reach", "error")


def test_a_worker_that_is_silent_is_told():
    [finding] = checks.presence(Workers(silent=["w@h"]), 2)

    assert "w@h" in finding.message
    assert "--timeout" in finding.cure


def test_a_worker_of_another_release_is_a_note():
    from celery_unique.keys.digest import KEY_VERSION

    [finding] = checks.same_versions(told(key_version=KEY_VERSION, library="0.0.9"))

    assert finding.level == "note"


def test_a_worker_without_a_store_is_told_with_its_reason():
    [finding] = checks.same_store(told(store=None, store_error="none is set"), "ab", "")

    assert "none is set" in finding.message


@pytest.mark.parametrize(
    ("package", "version", "found"),
    [
        ("celery", "5.4.0", ["celery 5.4.0 is installed; the tests run with 5.5 to 5.7"]),
        ("celery", "5.5.0", []),
        ("celery", "5.7.9", []),
        ("celery", "5.8.0rc1", ["celery 5.8.0rc1 is installed; the tests run with 5.5 to 5.7"]),
        ("redis", "8.1.2", []),
        ("redis", "9.0", ["redis 9.0 is installed; the tests run with 5.3 to 8"]),
    ],
)
def test_a_version_that_no_test_has_run_with_is_a_note(package, version, found):
    def installed(name: str) -> str:
        if name != package:
            raise PackageNotFoundError(name)
        return version

    findings = list(checks.untested_versions(installed))

    assert [finding.message for finding in findings] == found
    assert {finding.level for finding in findings} <= {"note"}


def test_a_python_that_no_test_of_this_celery_has_run_on_is_a_note():
    def found(celery: str, python: str) -> list[str]:
        def installed(name: str) -> str:
            if name != "celery":
                raise PackageNotFoundError(name)
            return celery

        return [each.message for each in checks.untested_versions(installed, python)]

    assert found("5.5.3", "3.13.1") == found("5.7.0", "3.14.2") == []
    assert found("5.5.3", "3.14.0") == [
        "Celery 5.5.3 runs on Python 3.14.0; its tests run on 3.11, 3.13"
    ]
    assert len(found("5.5.3", "3.12.1")) == 1
    assert len(found("5.7.0", "3.15.0a1")) == 1


def test_the_versions_of_this_environment_are_tested_ones():
    """All of tox.ini; of a Python and a Celery that are supported and not of the matrix it says
    so."""
    pair = "-".join(
        ".".join(each.split(".")[:2]) for each in (python_version(), celery.__version__)
    )

    findings = [each.message for each in checks.untested_versions()]

    assert [text for text in findings if "its tests run on" not in text] == []
    assert len(findings) == (0 if pair in VERSIONS else 1)
