"""The header of a message: its form on the wire is pinned, and what is not known is carried."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from celery_unique.header import HEADER, VERSION, LockHeader

KEY = "1:10b82e1a1f18ffba7656145a57c63e52143cd498c43f8681892a7959f76965a0"

FULL = LockHeader(
    task_id="5b1f",
    key=KEY,
    namespace="shop",
    store="0a1b2c3d",
    created_at=4102444800123,
    window_ms=600_000,
    keep="cd",
    arguments="ace6b19d3cc7fc30ce0200abe9a38440",
    outcome="replaced",
    sent_by="w1-1",
    delivery="w1-2",
    token=4102444860124456,
    again=True,
    watched=True,
)
#: Messages of one release wait in the broker for the workers of another: these names are fixed.
ON_THE_WIRE = {
    "v": 1,
    "id": "5b1f",
    "key": KEY,
    "ns": "shop",
    "store": "0a1b2c3d",
    "at": 4102444800123,
    "window": 600_000,
    "keep": "cd",
    "args": "ace6b19d3cc7fc30ce0200abe9a38440",
    "outcome": "replaced",
    "by": "w1-1",
    "delivery": "w1-2",
    "token": 4102444860124456,
    "again": True,
    "watched": True,
}
NEWER = {**ON_THE_WIRE, "v": 2, "colour": "blue", "nested": {"list": [1, None, {"x": 2.5}]}}


def test_the_name_and_the_version_are_pinned() -> None:
    assert (HEADER, VERSION) == ("celery_unique", 1)


def test_every_field_has_its_pinned_name_on_the_wire() -> None:
    assert FULL.as_message() == ON_THE_WIRE
    assert all(getattr(FULL, field.name) for field in fields(LockHeader) if field.name != "unknown")


def test_what_is_empty_is_not_sent() -> None:
    assert LockHeader("5b1f", KEY).as_message() == {"v": 1, "id": "5b1f", "key": KEY}


@pytest.mark.parametrize("message", [ON_THE_WIRE, {"v": 1, "id": "5b1f", "key": KEY}])
def test_what_was_sent_is_read(message: dict[str, Any]) -> None:
    header = LockHeader.from_message(json.loads(json.dumps(message)))

    assert header is not None
    assert header.as_message() == message
    assert replace(header, unknown={}) == (
        FULL if message is ON_THE_WIRE else LockHeader("5b1f", KEY)
    )


def test_a_newer_version_and_its_fields_are_carried_as_they_came() -> None:
    header = LockHeader.from_message(json.loads(json.dumps(NEWER)))

    assert header is not None
    assert replace(header, unknown={}) == FULL
    assert header.as_message() == NEWER


def test_an_older_message_without_a_version_is_read() -> None:
    header = LockHeader.from_message({"id": "5b1f", "key": KEY})

    assert header == LockHeader("5b1f", KEY)


def test_a_retry_carries_all_but_what_its_worker_had_added() -> None:
    header = LockHeader.from_message(NEWER)
    assert header is not None

    published = header.as_published().as_message()

    of_the_worker = ("delivery", "token", "again", "watched")
    kept = {name: value for name, value in NEWER.items() if name not in of_the_worker}
    assert published == {**kept, "by": "w1-2"}


def test_what_a_newer_release_says_never_stands_over_what_is_known_here() -> None:
    header = LockHeader.from_message(NEWER)
    assert header is not None

    changed = replace(header, delivery="w2-1", token=1).as_message()

    assert changed == {**NEWER, "delivery": "w2-1", "token": 1}


@pytest.mark.parametrize(
    "message",
    [
        None,
        "",
        "5b1f",
        7,
        [],
        ["id", "key"],
        {},
        {"id": "5b1f"},
        {"key": KEY},
        {"id": "", "key": KEY},
    ],
)
def test_what_is_not_a_header_of_ours_is_none(message: object) -> None:
    assert LockHeader.from_message(message) is None
