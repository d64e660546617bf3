"""The header of a message: its form on the wire is pinned, and what is not known is carried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_unique.header import HEADER, VERSION, DeliveryName, LockHeader
from tests.support import eventually
from tests.support.wrong_headers import READABLE, STRANGE_KEYS, UNREADABLE, changed

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
    copies=True,
    guard=True,
    merge=True,
    delivery="w1-2",
    token=4102444860124456,
    again=True,
    watched=True,
    payload='["5b1f",{"ids":[1]}]\n',
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
    "copies": True,
    "guard": True,
    "merge": True,
    "delivery": "w1-2",
    "token": 4102444860124456,
    "again": True,
    "watched": True,
    "payload": '["5b1f",{"ids":[1]}]\n',
}
NEWER = {**ON_THE_WIRE, "v": 2, "colour": "blue", "nested": {"list": [1, None, {"x": 2.5}]}}


def test_the_name_and_the_version_are_pinned():
    assert (HEADER, VERSION) == ("celery_unique", 1)


def test_every_field_has_its_pinned_name_on_the_wire():
    assert FULL.as_message() == ON_THE_WIRE
    assert all(getattr(FULL, field.name) for field in fields(LockHeader) if field.name != "unknown")


def test_what_is_empty_is_not_sent():
    assert LockHeader("5b1f", KEY).as_message() == {"v": 1, "id": "5b1f", "key": KEY}


@pytest.mark.parametrize("message", [ON_THE_WIRE, {"v": 1, "id": "5b1f", "key": KEY}])
def test_what_was_sent_is_read(message):
    header = LockHeader.from_message(json.loads(json.dumps(message)))

    assert header is not None
    assert header.as_message() == message
    assert replace(header, unknown={}) == (
        FULL if message is ON_THE_WIRE else LockHeader("5b1f", KEY)
    )


def test_a_newer_version_and_its_fields_are_carried_as_they_came():
    header = LockHeader.from_message(json.loads(json.dumps(NEWER)))

    assert header is not None
    assert replace(header, unknown={}) == FULL
    assert header.as_message() == NEWER


def test_an_older_message_without_a_version_is_read():
    header = LockHeader.from_message({"id": "5b1f", "key": KEY})

    assert header == LockHeader("5b1f", KEY)


def test_a_retry_carries_all_but_what_its_worker_had_added():
    header = LockHeader.from_message(NEWER)
    assert header is not None

    published = header.as_published().as_message()

    of_this_message = ("copies", "delivery", "token", "again", "watched", "payload")
    kept = {name: value for name, value in NEWER.items() if name not in of_this_message}
    assert published == {**kept, "by": "w1-2"}


def test_what_a_newer_release_says_never_stands_over_what_is_known_here():
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
def test_what_is_not_a_header_of_ours_is_none(message):
    assert LockHeader.from_message(message) is None


@pytest.mark.parametrize("variant", UNREADABLE)
def test_a_header_that_cannot_be_read_is_none_and_says_what_is_wrong(variant):
    header, wrong = LockHeader.read(UNREADABLE[variant]("5b1f", KEY))

    assert header is None
    assert wrong
    assert len(wrong) < 100  # and not the value, which may be long or private


@pytest.mark.parametrize("variant", READABLE)
def test_a_strange_header_that_does_no_harm_is_read(variant):
    header, wrong = LockHeader.read(READABLE[variant]("5b1f", KEY))

    assert header is not None
    assert wrong == ""


@pytest.mark.parametrize("key", STRANGE_KEYS)
def test_a_key_that_this_release_does_not_make_is_carried(key):
    header, _ = LockHeader.read(changed(key=key)("5b1f", KEY))

    assert header is not None
    assert header.key == key


def test_what_only_a_worker_adds_is_not_taken_from_a_producer():
    received = replace(FULL)
    received.receive_as("w9-1")

    assert (received.delivery, received.token, received.again, received.watched) == (
        "w9-1",
        0,
        False,
        False,
    )
    assert received.copies


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(st.one_of(ANYTHING, st.dictionaries(st.sampled_from([*ON_THE_WIRE, "other"]), ANYTHING)))
def test_reading_never_raises_and_what_is_read_has_the_types_that_every_store_takes(packed):
    header, wrong = LockHeader.read(packed)

    assert header is None or wrong == ""
    if header is not None:
        for field in fields(LockHeader):
            value, default = getattr(header, field.name), getattr(FULL, field.name)
            assert field.name == "unknown" or type(value) is type(default)
        assert header.key.encode()
        assert header.task_id.encode()


@given(
    st.sampled_from([name for name in ON_THE_WIRE if name != "v"]),
    ANYTHING,
)
def test_any_value_of_any_field_is_read_or_refused(name, value):
    header, wrong = LockHeader.read({**ON_THE_WIRE, name: value})

    assert (header is None) == bool(wrong)


def test_a_worker_is_dead_if_its_process_on_this_machine_is_gone():
    own = DeliveryName.new("w@here")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    machine = own.boot.partition(".")[2]

    assert machine, "only on Linux"
    assert own._replace(process=str(ended.pid)).has_died()
    assert own._replace(boot=f"1.{machine}").has_died()  # an earlier life with this process id


def test_a_worker_of_another_machine_or_with_a_living_process_may_be_alive():
    own = DeliveryName.new("w@here")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = own._replace(process=str(ended.pid))

    assert not own.has_died()
    assert not own._replace(process=str(os.getppid())).has_died()
    for boot in ("1", "1.00000000", "", "."):  # of an older release, another machine, a container
        assert not gone._replace(boot=boot).has_died()
    for name in ("w1-1", "", "a/b/c/d", "w/-1/1.0/1", f"w/x/{own.boot}/1"):
        assert not DeliveryName.parse(name).has_died()


@pytest.mark.parametrize("refusal", [None, PermissionError])
def test_a_living_worker_that_proc_hides_is_alive(monkeypatch, refusal):
    """Of another user, with hidepid=2 or systemd's ProtectProc=invisible."""
    living = DeliveryName.new("w@here")._replace(process=str(os.getppid()))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kill = os.kill

    def hidden(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    def checked(process: int, signal: int) -> None:
        kill(process, signal)
        if refusal is not None:
            raise refusal

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", checked)

    assert not living.has_died()
    assert living._replace(process=str(ended.pid)).has_died()


def test_a_process_id_that_no_kernel_has_is_that_of_a_dead_worker():
    assert DeliveryName.new("w@here")._replace(process="9" * 30).has_died()


def test_a_worker_that_was_killed_and_not_reaped_yet_is_dead():
    own = DeliveryName.new("w@here")
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    try:
        eventually(lambda: own._replace(process=str(zombie.pid)).has_died())
    finally:
        zombie.wait()
