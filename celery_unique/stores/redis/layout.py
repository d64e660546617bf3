"""How locks are stored in Redis: one hash for each key.

``<key_prefix>cu:{<bucket>}:<key>``, and ``<key_prefix>cu:{<bucket>}@<namespace>:<key>`` with a
namespace. Its fields: ``t:<id>`` for each task and ``m:<id>`` for each mark, both JSON, ``n``, the
task name, and ``token`` once a task has started. The braces make the bucket the cluster's hash tag.
A task's values are those of `TaskEntry`, but for its lease, which counts from its creation, and its
name, which is left out where it is the one of ``n``: so they stay below the 64 bytes up to which
Redis packs a hash tightly.

While a key has followers its hash has a field ``f``, a second hash ``...cu:{<bucket>}f:<key>``
holds them, a field for each, and the key is in the bucket's sorted set ``...cu:{<bucket>}due``
(both with the namespace, if any, after the word).

Marks beyond the first 16 are in another hash, ``...cu:{<bucket>}m:<key>``, a field for each id.
While there are any, the record has a field ``m:`` without an id: until when, and how many.

While tasks of the key have payloads, the values of merged calls, a hash
``...cu:{<bucket>}p:<key>`` holds these.

A call whose message was pushed by the store leaves a receipt, ``...cu:{<bucket>}r:<attempt>``: the
reply, as JSON. It expires soon.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from celery_unique.stores.record import BESIDE, Mark, Record, TaskEntry
from celery_unique.stores.record_followers import Following, Joined, typed

#: Part of the key version: a key, and what later belongs to it, share one cluster slot.
BUCKETS = 64


class Names(NamedTuple):
    """The keys of a script, in the order of its KEYS."""

    record: str
    followers: str
    due: str
    marks: str


class Layout:
    def __init__(self, namespace: str, key_prefix: str) -> None:
        self._head = f"{key_prefix}cu:{{"
        # Quoted, so that no namespace can look like another one with a key behind it.
        place = f"@{quote(namespace, safe='/@+')}" if namespace else ""
        self._tail = f"}}{place}:"
        self._followers_tail = f"}}f{place}:"
        self._due_tail = f"}}due{place}"
        self._marks_tail = f"}}m{place}:"
        self._payloads_tail = f"}}p{place}:"
        self._receipts_tail = f"}}r{place}:"
        #: The prefixes of the names in each bucket; the whole name of its due set.
        self._starts = [
            (
                f"{self._head}{bucket}{self._tail}",
                f"{self._head}{bucket}{self._followers_tail}",
                f"{self._head}{bucket}{self._due_tail}",
                f"{self._head}{bucket}{self._marks_tail}",
            )
            for bucket in range(BUCKETS)
        ]
        self._named = re.compile(re.escape(self._head) + r"\d+" + re.escape(self._tail))
        #: Names of recent keys: every act on a key needs them.
        self.names_of = lru_cache(maxsize=1024)(self._names_of)
        #: For SCAN's MATCH; it may match other names too, for which ``key_of`` returns None.
        self.pattern = f"{_literally(self._head)}*{_literally(self._tail)}*"

    def name_of(self, key: str) -> str:
        return self._starts[bucket_of(key)][0] + key

    def _names_of(self, key: str) -> Names:
        record, followers, due, marks = self._starts[bucket_of(key)]
        return Names(record + key, followers + key, due, marks + key)

    def receipt_of(self, key: str, attempt: str) -> str:
        return f"{self._head}{bucket_of(key)}{self._receipts_tail}{attempt}"

    def payloads_of(self, key: str) -> str:
        return f"{self._head}{bucket_of(key)}{self._payloads_tail}{key}"

    def due_sets(self) -> list[str]:
        return [due for _, _, due, _ in self._starts]

    def key_of(self, name: str) -> str | None:
        found = self._named.match(name)
        return name[found.end() :] if found else None


def bucket_of(key: str) -> int:
    version, _, digest = key.partition(":")
    if version.isdecimal():
        try:
            return int(digest[:2], 16) % BUCKETS
        except ValueError:  # not a key of this library
            pass
    return zlib.crc32(key.encode()) % BUCKETS


def record_of(fields: list[bytes], now: int) -> Record:
    """The record from the reply to HGETALL, without what has lapsed."""
    record, task_name = Record(), ""
    nameless = set()  # beside a task that has a name
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        kind, _, task_id = name.decode().partition(":")
        if kind == "t":
            values = typed(json.loads(value), (int, str, int, int))
            values[3] += values[2]
            if values[4:5] == [False]:
                values[4] = ""
                nameless.add(task_id)
            record.tasks[task_id] = TaskEntry.unpacked(values)
        elif kind == "m" and task_id == BESIDE:
            _, record.more_until, record.more_marks = typed(json.loads(value)[:3], (str, int, int))
        elif kind == "m":
            record.marks[task_id] = Mark.unpacked(json.loads(value))
        elif kind == "n":
            task_name = value.decode()
        elif kind == "token":
            record.token = int(value)
        elif kind == "f":
            record.following = Following.unpacked(json.loads(value))
    for task_id, task in record.tasks.items():
        if not task.task_name and task_id not in nameless:
            task.task_name = task_name
    record.purge(now)
    return record


def joined_of(value: bytes) -> Joined:
    """A follower from its field in the second hash: a line of JSON, and the message."""
    facts, _, message = value.partition(b"\n")
    return Joined.of(json.loads(facts), message.decode())


def _literally(text: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)
