"""Headers of messages that no release of this library has sent: what a foreign producer, or one
from the future, may put there. Each is made for a message's id and a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Header = Callable[[str, str], Any]


def changed(**fields: Any) -> Header:
    return lambda task_id, key: {"v": 1, "id": task_id, "key": key, "at": 1, **fields}


def _without(name: str) -> Header:
    def header(task_id: str, key: str) -> Any:
        fields = {"v": 1, "id": task_id, "key": key}
        del fields[name]
        return fields

    return header


#: The task runs without a lock, and that is reported once.
UNREADABLE: Mapping[str, Header] = {
    "a text": lambda task_id, key: f"{task_id}/{key}",
    "a number": lambda task_id, key: 7,
    "a list": lambda task_id, key: ["id", task_id, "key", key],
    "true": lambda task_id, key: True,
    "an empty mapping": lambda task_id, key: {},
    "no id": _without("id"),
    "no key": _without("key"),
    "id is null": changed(id=None),
    "id is a number": changed(id=7),
    "id is a list": changed(id=["a"]),
    "id is empty": changed(id=""),
    "key is null": changed(key=None),
    "key is empty": changed(key=""),
    "key is a number": changed(key=7),
    "key is a mapping": changed(key={"digest": "00"}),
    "key is bytes": changed(key=b"1:00"),
    "key is very long": changed(key="1:" + "0" * 100_000),
    "key is half a surrogate pair": changed(key="1:\ud800"),
    "key holds NUL": changed(key="1:\0"),
    "at is null": changed(at=None),
    "at is a text": changed(at="2026-01-01T00:00:00Z"),
    "at is a fraction": changed(at=1.5),
    "at is true": changed(at=True),
    "at is below zero": changed(at=-1),
    "at is huge": changed(at=10**40),
    "at is NaN": changed(at=float("nan")),
    "at is a list": changed(at=[1]),
    "window is null": changed(window=None),
    "window is a text": changed(window="PT10M"),
    "window is below zero": changed(window=-600_000),
    "window is huge": changed(window=2**63),
    "keep is a list": changed(keep=["completed"]),
    "keep is a number": changed(keep=3),
    "args is a mapping": changed(args={"a": 1}),
    "args is half a surrogate pair": changed(args="\udfff"),
    "store is a mapping": changed(store={"url": "redis://"}),
    "store is null": changed(store=None),
    "ns is a number": changed(ns=1),
    "by is a list": changed(by=["w1", 1]),
    "outcome is a mapping": changed(outcome={}),
    "copies is a number": changed(copies=1),
    "delivery is a number": changed(delivery=5),
    "token is a text": changed(token="first"),
    "token is below zero": changed(token=-1),
    "again is a text": changed(again="yes"),
    "watched is null": changed(watched=None),
}

#: Strange, and readable: the lock is as any other.
READABLE: Mapping[str, Header] = {
    "a delivery and a token of the producer's own": changed(delivery="x", token=5, again=True),
    "a delivery without slashes, of a sender": changed(by="x"),
    "a version from the future": changed(v=99, colour={"nested": [[[None]]]}),
    "a version that is no number": changed(v=[None]),
    "a time in the year 9999": changed(at=253_402_300_799_000),
}
#: Keys that this release does not make.
STRANGE_KEYS = ("9:zz", "k", "with\nnewline", "}{1}:x", "*", "ключ", "1:" + "f" * 250)
