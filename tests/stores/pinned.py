"""The pinned records of ``tests/vectors/records.json``, put into a store and taken out of it raw.

An entry has a ``name`` and a ``description``; ``since``, the entry that was there before, if any;
``acts``, each with the milliseconds since ``clock_us`` at which it is done; ``read``, what the
record means; ``redis`` and ``sql``, how it lies there. The key itself is no part of it. To add one,
write it without the last three, and take them from what the test says it found: **read that
first**. What is pinned is never changed within a version of the record, but for ``expires_at``, by
which the store deletes what is left: that is no part of the form.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import text

from celery_unique.stores.base import Claim, Finish, Held, LockStore, Start
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Mark, MarksInMemory, Record, State, TaskEntry
from celery_unique.stores.record_followers import Following, Group, Joined, Lane
from celery_unique.stores.redis import RedisStore, scripts
from celery_unique.stores.redis.commands import Commands
from celery_unique.stores.redis.layout import joined_of
from celery_unique.stores.sql import SqlStore
from celery_unique.stores.sql import statements as dialects

FILE = Path(__file__).parents[1] / "vectors" / "records.json"
PINNED: dict[str, Any] = json.loads(FILE.read_text())
RECORDS: dict[str, dict[str, Any]] = {record["name"]: record for record in PINNED["records"]}
CLOCK_US: int = PINNED["clock_us"]

Raw = dict[str, Any]


def play(store: LockStore, key: str, act: dict[str, Any]) -> Any:
    """Carry out an act of an entry at its moment."""
    given = dict(act)
    name = given.pop("act")
    store.clock_offset_ms = given.pop("at")
    if "state" in given:
        given["state"] = State(given["state"])
    if name == "acquire":
        reply: Any = store.acquire(key, Claim(**given))
    elif name == "start":
        reply = store.start(key, Start(**given))
    elif name == "finish":
        reply = store.finish(key, Finish(**given))
    elif name == "settle":
        mark_done = given.pop("mark_done")
        reply = store.settle(key, Finish(**given), mark_done)
    elif name == "renew":
        reply = store.renew([Held(key, **given)])
    else:
        reply = getattr(store, name)(key, **given)
    store.flush()
    return reply


def moment_of(entry: dict[str, Any]) -> int:
    """When the entry is as it is pinned."""
    return int(entry["acts"][-1]["at"])


# -- what a record means ------------------------------------------------------


def shown(store: LockStore, key: str) -> dict[str, Any]:
    """What the store reads, as in ``read`` of an entry."""
    record, _ = store.read(key)
    found = asdict(record)
    assert found.pop("unreadable") == ""  # nothing that is stored
    del found["followers"], found["beside"], found["payloads"]
    if not record.more_until:
        del found["more_until"], found["more_marks"]
    for task in found["tasks"].values():  # younger than most of what is pinned
        if not task["held_until"]:
            del task["held_until"]
    for mark in found["marks"].values():
        if not mark["lasting"]:
            del mark["lasting"]
    found["followers"] = {name: asdict(one) for name, one in store.followers(key)}
    if found["following"] is not None:
        if found["following"]["lane"] is None:  # younger, too
            del found["following"]["lane"]
        else:
            found["parked"] = store.parked(key)
    return found


def in_memory(entry: dict[str, Any]) -> tuple[MemoryStore, str]:
    """The rules in Python over what the entry means, at its moment; and its key."""
    store, key = MemoryStore(), "pinned"
    store._now_us = lambda: CLOCK_US + store.clock_offset_ms * 1000  # type: ignore[method-assign]
    read = entry["read"]
    following = read["following"]
    store._records[key] = Record(
        read["token"],
        {name: TaskEntry(**fields) for name, fields in read["tasks"].items()},
        {name: Mark(**fields) for name, fields in read["marks"].items()},
        following
        and Following(
            **{
                **following,
                "groups": {name: Group(**fields) for name, fields in following["groups"].items()},
                "promoted": dict(following["promoted"]),
                "lane": _lane(following["lane"]) if "lane" in following else None,
            }
        ),
        {
            name: Joined("", 0, value) if name[:1] == "\n" else joined_of(value.encode())
            for name, value in entry["redis"].get("followers", {}).items()
        },
        read.get("more_until", 0),
        read.get("more_marks", 0),
        MarksInMemory(
            OrderedDict(
                (name, Mark.unpacked(json.loads(value)))
                for name, value in entry["redis"].get("marks", {}).items()
            )
        ),
    )
    payloads = entry["redis"].get("payloads", {})
    for name in [name for name in payloads if name.startswith("m:")]:
        chunks, size, until = map(int, payloads[name].split())
        text = "".join(payloads[f"{n}:{name[2:]}"] for n in range(1, chunks + 1))
        for line in text.splitlines(keepends=True):
            store._records[key].payloads.append(name[2:], line, size, until)
            size = 0
    store.clock_offset_ms = moment_of(entry)
    return store, key


def _lane(fields: dict[str, Any]) -> Lane:
    return Lane(**{**fields, "called": dict(fields["called"])})


# -- how it lies in a store ---------------------------------------------------


class InRedis:
    form = "redis"

    def __init__(self, store: RedisStore, client: redis.Redis) -> None:
        self.store = store
        self._client = client

    def put(self, key: str, raw: Raw) -> None:
        names = self.store._layout.names_of(key)
        self._client.hset(names.record, mapping=raw["record"])
        self._client.pexpireat(names.record, raw["expires_at"])
        if "followers" in raw:
            self._client.hset(names.followers, mapping=raw["followers"])
            self._client.zadd(names.due, {names.record: raw["due_at"]})
        if "marks" in raw:
            self._client.hset(names.marks, mapping=raw["marks"])
            self._client.pexpireat(names.marks, raw["marks_expire_at"])
        if "payloads" in raw:
            payloads = self.store._layout.payloads_of(key)
            self._client.hset(payloads, mapping=raw["payloads"])
            self._client.pexpireat(payloads, raw["payloads_expire_at"])

    def stored(self, key: str) -> Raw:
        names = self.store._layout.names_of(key)
        raw: Raw = {
            "record": _decoded(self._client.hgetall(names.record)),
            "expires_at": self._client.pexpiretime(names.record),
        }
        if self._client.exists(names.followers):
            raw["followers"] = _decoded(self._client.hgetall(names.followers))
            raw["due_at"] = int(self._client.zscore(names.due, names.record))
        if self._client.exists(names.marks):
            raw["marks"] = _decoded(self._client.hgetall(names.marks))
            raw["marks_expire_at"] = self._client.pexpiretime(names.marks)
        payloads = self.store._layout.payloads_of(key)
        if self._client.exists(payloads):
            raw["payloads"] = _decoded(self._client.hgetall(payloads))
            raw["payloads_expire_at"] = self._client.pexpiretime(payloads)
        return raw


class InSql:
    form = "sql"

    _COLUMNS = (
        *("record", "token", "expires_at", "conflicts", "conflict_at", "holder_state"),
        *("holder_since", "holder_until", "due_at", "schema_version"),
    )

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        store.ping()  # the tables are there

    def put(self, key: str, raw: Raw) -> None:
        columns = ", ".join(self._COLUMNS)
        values = ", ".join(f":{name}" for name in self._COLUMNS)
        self._execute(
            f"INSERT INTO celery_unique_lock (namespace, lock_key, revision, {columns})"
            f" VALUES ('', :key, 1, {values})",
            {"key": key, **{name: raw[name] for name in self._COLUMNS}},
        )
        for follower_id, (facts, message) in raw.get("followers", {}).items():
            self._execute(
                "INSERT INTO celery_unique_lock_followers VALUES ('', :key, :id, :facts, :message)",
                {"key": key, "id": follower_id, "facts": facts, "message": message},
            )

        for task_id, (kind, until, by) in raw.get("marks", {}).items():
            self._execute(
                "INSERT INTO celery_unique_lock_marks VALUES ('', :key, :id, :kind, :until, :by)",
                {"key": key, "id": task_id, "kind": kind, "until": until, "by": by},
            )

        for task_id, chunks in raw.get("payloads", {}).items():
            for number, lines, total, until in chunks:
                self._execute(
                    "INSERT INTO celery_unique_lock_payloads"
                    " VALUES ('', :key, :id, :number, :lines, :total, :until)",
                    {"key": key, "id": task_id, "number": number, "lines": lines}
                    | {"total": total, "until": until},
                )

    def stored(self, key: str) -> Raw:
        [row] = self._execute(
            f"SELECT {', '.join(self._COLUMNS)} FROM celery_unique_lock WHERE lock_key = :key",
            {"key": key},
        )
        followers = self._execute(
            "SELECT follower_id, facts, message FROM celery_unique_lock_followers"
            " WHERE lock_key = :key",
            {"key": key},
        )
        raw = dict(zip(self._COLUMNS, row, strict=True))
        if followers:
            raw["followers"] = {one: [facts, message] for one, facts, message in followers}
        marks = self._execute(
            "SELECT task_id, kind, expires_at, replaced_by FROM celery_unique_lock_marks"
            " WHERE lock_key = :key",
            {"key": key},
        )
        if marks:
            raw["marks"] = {one: list(mark) for one, *mark in marks}
        payloads = self._execute(
            "SELECT task_id, chunk, call_lines, total_bytes, expires_at"
            " FROM celery_unique_lock_payloads WHERE lock_key = :key ORDER BY task_id, chunk",
            {"key": key},
        )
        for task_id, *chunk in payloads:
            raw.setdefault("payloads", {}).setdefault(task_id, []).append(chunk)
        return raw

    def _execute(self, statement: str, values: dict[str, Any]) -> list[Any]:
        def run(session: Any) -> list[Any]:
            result = session.execute(text(statement), values)
            return result.all() if result.returns_rows else []

        return self.store._database.run(run)


Place = InRedis | InSql


def _decoded(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


# -- stores whose clock stands still ------------------------------------------


@contextmanager
def stopped_clocks() -> Iterator[None]:
    """Stores that are opened meanwhile see ``clock_us`` and their offset, and no other time."""
    with pytest.MonkeyPatch.context() as patch:
        _stop_scripts(patch)
        clock = replace(dialects.POSTGRESQL, clock="CAST(:client_us AS BIGINT)")
        patch.setitem(dialects.DIALECTS, "postgresql", clock)
        patch.setitem(dialects.DIALECTS, "mysql", replace(dialects.MYSQL, clock=":client_us"))
        patch.setattr(SqlStore, "_client_us", lambda store: CLOCK_US)
        now_ms = CLOCK_US // 1000
        patch.setattr(Commands, "now", lambda store, clock: now_ms + store.clock_offset_ms)
        yield


@contextmanager
def opened(url: str) -> Iterator[Place]:
    if url.startswith("redis"):
        with closing(RedisStore.from_url(url)) as store, redis.Redis.from_url(url) as client:
            yield InRedis(store, client)
    else:
        with closing(SqlStore.from_url(url, timeout_s=20)) as store:
            yield InSql(store)


def _stop_scripts(patch: pytest.MonkeyPatch) -> None:
    """The acts as they are, but for the time: a server's clock cannot be stopped."""
    seconds, microseconds = divmod(CLOCK_US, 1_000_000)
    asked, told = b'redis.call("TIME")', f'{{"{seconds}", "{microseconds}"}}'.encode()
    for name, script in list(vars(scripts).items()):
        if isinstance(script, scripts.Script):
            assert script.body.count(asked) == 1
            body = script.body.replace(asked, told)
            sha = hashlib.sha1(body, usedforsecurity=False).hexdigest()
            patch.setattr(scripts, name, scripts.Script(body, sha))
            patch.setitem(scripts.BY_SHA, sha, scripts.Script(body, sha))
