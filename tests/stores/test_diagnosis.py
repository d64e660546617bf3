"""What a real store tells of itself."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.diagnosis import Diagnosis
from tests.kit import RedisServer
from tests.kit.server import free_port


def diagnose(url: str) -> Diagnosis:
    store = open_store(url)
    try:
        told: Diagnosis = store.diagnose()  # type: ignore[attr-defined]
    finally:
        store.close()
    return told


def found(told: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in told.findings]


@pytest.mark.parametrize(
    ("fixture", "server"),
    [
        pytest.param("redis_url", r"Redis \d+\.\d+\.\d+", marks=pytest.mark.server),
        pytest.param("valkey_url", r"Valkey \d+\.\d+\.\d+", marks=pytest.mark.server),
    ],
)
def test_redis_tells_version_persistence_and_eviction(
    request: pytest.FixtureRequest, fixture: str, server: str
) -> None:
    told = diagnose(request.getfixturevalue(fixture))

    assert told.reach == "network"
    assert re.fullmatch(server, told.facts["server"])
    assert told.facts["eviction"] == "noeviction"
    assert told.facts["persistence"] == "nothing"  # as the tests start it
    assert found(told) == [("persistence", "warning")]


def test_postgresql_tells_version_and_role(postgres_url: str) -> None:
    told = diagnose(postgres_url)

    assert told.reach == "network"
    assert told.facts["server"].startswith("PostgreSQL ")
    assert told.facts["role"] == "primary"
    assert urlsplit(postgres_url).path in told.facts["place"]


def test_sqlite_is_shared_on_one_machine(sqlite_url: str) -> None:
    told = diagnose(sqlite_url)

    assert told.reach == "machine"
    assert told.facts["server"].startswith("SQLite 3.")
    assert told.facts["journal"] == "wal"
    assert not told.findings


def test_memory_is_shared_in_one_process() -> None:
    assert diagnose("memory://").reach == "process"


def test_a_user_without_the_rights_gets_a_note(redis_server: RedisServer, redis_url: str) -> None:
    with redis_server.client() as client:
        client.acl_setuser(
            "few", enabled=True, passwords=["+secret"], keys=["cu:*"], commands=["+ping", "+select"]
        )
    try:
        told = diagnose(redis_url.replace("redis://", "redis://few:secret@"))
    finally:
        with redis_server.client() as client:
            client.acl_deluser("few")

    assert found(told) == [("rights", "note")]
    assert "secret" not in told.findings[0].message


def test_a_store_that_is_away_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable):
        diagnose(f"redis://127.0.0.1:{free_port()}/0")
