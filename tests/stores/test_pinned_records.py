"""The pinned records: a change of how any of them is stored is a new version of the record.

Two releases share a store while one is rolled out, and locks outlive an upgrade: what one wrote the
other must read. The Lua scripts and Python both read and write records, and are held to the same
ones here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest

from celery_unique.stores.record import (
    LETTER_OF,
    MARK_KINDS,
    SCHEMA_VERSION,
    Record,
    State,
    TaskEntry,
)
from celery_unique.stores.record_followers import Joined
from celery_unique.stores.redis.layout import Layout, joined_of
from celery_unique.stores.sql.statements import TABLE_VERSION
from celery_unique.testing.store_contract.factories import fresh_key
from tests.stores import pinned
from tests.stores.pinned import PINNED, RECORDS, Place, in_memory, moment_of, play, shown
from tests.support import MariaDBServer, PostgresServer, RedisServer

each = pytest.mark.parametrize("entry", RECORDS.values(), ids=RECORDS)


@pytest.fixture(scope="module")
def stopped_clocks() -> Iterator[None]:
    with pinned.stopped_clocks():
        yield


@pytest.fixture(scope="module")
def sqlite_place(stopped_clocks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pinned.opened(f"sqlite:///{tmp_path_factory.mktemp('pinned')}/locks.db") as place:
        yield place


@pytest.fixture(scope="module")
def postgres_place(stopped_clocks: None, postgres_server: PostgresServer) -> Iterator[Place]:
    with pinned.opened(postgres_server.fresh_url()) as place:
        yield place


@pytest.fixture(scope="module")
def mariadb_place(stopped_clocks: None, mariadb_server: MariaDBServer) -> Iterator[Place]:
    with pinned.opened(mariadb_server.fresh_url()) as place:
        yield place


@pytest.fixture(scope="module")
def redis_place(stopped_clocks: None, redis_server: RedisServer) -> Iterator[Place]:
    with pinned.opened(redis_server.fresh_url()) as place:
        yield place


@pytest.fixture(scope="module")
def valkey_place(stopped_clocks: None, valkey_server: RedisServer) -> Iterator[Place]:
    with pinned.opened(valkey_server.fresh_url()) as place:
        yield place


@pytest.fixture(
    params=[
        pytest.param("sqlite_place", id="sqlite"),
        pytest.param("postgres_place", id="postgresql", marks=pytest.mark.server),
        pytest.param("mariadb_place", id="mariadb", marks=pytest.mark.server),
        pytest.param("redis_place", id="redis", marks=pytest.mark.server),
        pytest.param("valkey_place", id="valkey", marks=pytest.mark.server),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


# -- every store reads and writes them --------------------------------------------------------


@each
def test_what_is_pinned_is_read_as_what_it_means(place, entry):
    key = fresh_key()
    place.put(key, entry[place.form])
    place.store.clock_offset_ms = moment_of(entry)

    assert shown(place.store, key) == entry["read"]
    assert dict(place.store.walk())[key] == place.store.read(key)[0]


@each
def test_what_acts_leave_is_stored_as_it_is_pinned(place, entry):
    key = fresh_key()
    if "since" in entry:
        place.put(key, RECORDS[entry["since"]][place.form])

    for act in entry["acts"]:
        play(place.store, key, act)

    assert comparable(place.stored(key)) == comparable(entry[place.form])


def comparable(raw: dict[str, Any]) -> dict[str, Any]:
    """The order of the names in an object is nobody's promise, and Lua's own in one of them."""
    record = raw["record"]
    if isinstance(record, dict) and "f" in record:
        return {**raw, "record": {**record, "f": json.loads(record["f"])}}
    return raw


DAY = 24 * 3_600_000
CALL = {"act": "acquire", "task_id": "z", "task_name": "shop.z", "states": "pswrtcdx"}
RUN = {"task_name": "shop.rebuild", "lease_ms": DAY, "run_lease_ms": 60_000, "mark_ms": DAY}
END = {"state": "completed", "retention_ms": DAY, "mark_ms": DAY, "run_lease_ms": 60_000}
NEXT: list[dict[str, Any]] = [
    {**CALL, "grace_ms": 30_000},
    {**CALL, "grace_ms": 30_000, "arguments": RECORDS["described"]["acts"][0]["arguments"]},
    {**CALL, "grace_ms": 30_000, "on_conflict": "replace", "max_wait_ms": 1},
    {**CALL, "grace_ms": 30_000, "on_conflict": "rerun", "join": "message of z"},
    *(
        act
        for task in ("a", "b", "f")
        for act in (
            {"act": "start", "task_id": task, "delivery": "d1", **RUN},
            {"act": "start", "task_id": task, "delivery": "d2", **RUN},
            {"act": "finish", "task_id": task, "delivery": "d1", **END},
            {"act": "settle", "task_id": task, "delivery": "d1", **END, "mark_done": False},
            {"act": "cancel", "task_id": task, "mark_ms": DAY},
            {"act": "retry", "task_id": task, "delivery": "d1", "lease_ms": DAY, "copies": True},
        )
    ),
    {"act": "renew", "task_id": "a", "delivery": "d1", "lease_ms": DAY, "run_lease_ms": 60_000},
    {"act": "confirm", "task_id": "b", "lease_ms": DAY},
    {"act": "give_back", "task_id": "b", "mark_ms": DAY},
    {"act": "release"},
    {"act": "reap", "reaper": "w1", "claim_ms": 60_000},
    {"act": "complete_follower", "follower_id": "g"},
    {"act": "forget", "task_id": "a"},
    {**CALL, "task_name": "shop.rebuild", "grace_ms": 30_000, "on_conflict": "merge"}
    | {"merge": '{"doc_ids":[9]}', "merge_max_bytes": 1000, "again": True},
    {"act": "unmerge", "call_id": "b"},
    {**CALL, "grace_ms": 30_000, "on_conflict": "queue", "join": "message of z", "limit": 2},
]


@each
def test_acts_on_what_is_pinned_answer_and_leave_what_the_rules_in_python_do(place, entry):
    for act in NEXT:
        at_its_time = {**act, "at": moment_of(entry) + 1}
        key = fresh_key()
        place.put(key, entry[place.form])
        rules, their_key = in_memory(entry)

        answer = play(place.store, key, at_its_time)
        expected = play(rules, their_key, at_its_time)

        assert answer == expected, act
        left, to_leave = shown(place.store, key), shown(rules, their_key)
        if not (to_leave["tasks"] or to_leave["marks"] or to_leave["following"]):
            left["token"] = to_leave["token"] = 0  # of a record that is gone
        assert left == to_leave, act


@pytest.mark.parametrize("name", ["followed", "reaped", "promoted", "parked", "called"])
def test_followers_that_are_pinned_are_found_when_they_are_due(place, name):
    key, entry = fresh_key(), RECORDS[name]
    place.put(key, entry[place.form])
    due = entry["read"]["following"]["due_at"] - pinned.CLOCK_US // 1000

    place.store.clock_offset_ms = due - 1
    before = place.store.due(limit=10_000)
    place.store.clock_offset_ms = due
    then = place.store.due(limit=10_000)

    assert key not in before
    assert key in then


# -- the file itself ---------------------------------------------------------------------------


def packed_tasks() -> list[list[Any]]:
    in_redis = [
        json.loads(value)
        for entry in RECORDS.values()
        for field, value in entry["redis"]["record"].items()
        if field.startswith("t:")
    ]
    in_sql = [
        task
        for entry in RECORDS.values()
        for task in json.loads(entry["sql"]["record"])["t"].values()
    ]
    assert len(in_redis) == len(in_sql)
    return in_redis + in_sql


def test_the_version_is_the_first_value_of_every_task_and_stands_in_every_row():
    assert SCHEMA_VERSION == 1
    assert TABLE_VERSION == 1
    assert {task[0] for task in packed_tasks()} == {SCHEMA_VERSION}
    assert {entry["sql"]["schema_version"] for entry in RECORDS.values()} == {TABLE_VERSION}


def test_every_value_that_a_record_can_have_is_pinned():
    tasks = [TaskEntry(**task) for e in RECORDS.values() for task in e["read"]["tasks"].values()]
    marks = [mark for entry in RECORDS.values() for mark in entry["read"]["marks"].values()]

    for field in fields(TaskEntry):
        assert any(getattr(task, field.name) for task in tasks), field.name
    stored_states = {letter for state, letter in LETTER_OF.items() if state is not State.SCHEDULED}
    assert {task.state for task in tasks} == stored_states
    assert {letter for task in tasks for letter in task.flags} == set("cemop")
    assert {mark["kind"] for mark in marks} == set(MARK_KINDS)
    assert any(mark["by"] for mark in marks)
    assert max(len(task) for task in packed_tasks()) == len(fields(TaskEntry)) + 1


@each
def test_python_packs_and_unpacks_what_is_pinned(entry):
    text = entry["sql"]["record"]

    assert Record.loads(text).dumps() == text


@each
def test_values_of_a_newer_release_are_read_over(entry):
    document = json.loads(entry["sql"]["record"])
    for name, task in document["t"].items():
        whole = [2, *asdict(TaskEntry.unpacked(task)).values()]
        document["t"][name] = [*whole, "of a newer release", {"x": 1}]
    for mark in document.get("m", {}).values():
        mark += ["", "of a newer release"][len(mark) - 2 :]
    if "f" in document:
        document["f"]["newer"] = 1
        document["f"]["g"] = {name: [*group, "newer"] for name, group in document["f"]["g"].items()}
    document["newer"] = []

    assert Record.loads(json.dumps(document)) == Record.loads(entry["sql"]["record"])


def test_a_follower_is_the_same_in_every_store():
    for entry in RECORDS.values():
        in_redis, in_sql = (entry[form].get("followers", {}) for form in ("redis", "sql"))
        # The place of a parked call is its id alone in Redis.
        places = {one: value for one, value in in_redis.items() if one[:1] == "\n"}
        assert places == {one: id_ for one, (_, id_) in in_sql.items() if one[:1] == "\n"}
        assert {i: joined_of(v.encode()) for i, v in in_redis.items() if i not in places} == {
            one: Joined.of(json.loads(facts), message)
            for one, (facts, message) in in_sql.items()
            if one not in places
        }


@pytest.mark.parametrize("names", PINNED["redis_names"], ids=lambda names: names["key"][:6])
def test_a_lock_has_the_pinned_names_in_redis(names):
    layout = Layout(names["namespace"], names["key_prefix"])

    found = layout.names_of(names["key"])

    assert found == (names["record"], names["followers"], names["due"], names["marks"])
    assert layout.key_of(found.record) == names["key"]
