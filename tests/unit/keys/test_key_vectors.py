"""The pinned vectors: a change of any of them is a new version of keys."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from celery_unique.keys.digest import KEY_VERSION, key_of
from tests.vectors import generate

VECTORS = {vector["name"]: vector for vector in generate.load()}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "key-format.md"

each = pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
KEYED = {name: vector for name, vector in VECTORS.items() if "idempotency_key" in vector}
each_keyed = pytest.mark.parametrize("vector", KEYED.values(), ids=KEYED)


@each
def test_text_and_key_are_those_pinned(vector):
    text = generate.text_of(vector)

    assert text == vector["text"]
    assert key_of(text, vector.get("secret")) == vector["key"]


@each
def test_the_store_is_asked_for_the_pinned_key_and_fingerprint(vector):
    found = generate.identity_of(vector)

    assert (found.key, found.arguments) == (vector["key"], vector.get("fingerprint", ""))


@each
def test_the_pinned_key_is_a_plain_digest_of_the_pinned_text(vector):
    # Without a line of ours, so that whoever reads the file can do the same.
    assert vector["key"] == f"{KEY_VERSION}:{digest_of(vector['text'], vector.get('secret'))}"


@each_keyed
def test_the_pinned_fingerprint_is_a_digest_of_task_and_digest_of_arguments(vector):
    # As on the page: the inner digest is an HMAC where there is a secret, the outer never is.
    arguments = digest_of(vector["arguments"], vector.get("secret"))

    assert vector["fingerprint"] == digest_of(f"{vector['task']} {arguments}")[:32]


def digest_of(text: str, secret: str | None = None) -> str:
    if secret is None:
        return hashlib.sha256(text.encode()).hexdigest()
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def test_a_fingerprint_tells_task_and_arguments_apart_and_nothing_else():
    first: dict[tuple[Any, ...], str] = {}
    for vector in KEYED.values():
        work = (vector["task"], vector["arguments"], vector.get("secret"))
        assert first.setdefault(work, vector["fingerprint"]) == vector["fingerprint"]

    assert len(set(first.values())) == len(first) >= 6
    assert {bool(vector.get("meta")) for vector in KEYED.values()} == {True, False}


@each
def test_the_pinned_text_is_nfc_and_what_the_reference_library_writes(vector):
    text = vector["text"]
    assert unicodedata.is_normalized("NFC", text)

    try:
        again = rfc8785.dumps(json.loads(text)).decode()
    except rfc8785.IntegerDomainError:
        assert re.search(r"\d{16}", text)
    else:
        assert again == text


def test_vectors_have_the_same_key_only_where_they_say_so():
    said = {vector["name"]: vector.get("same_as", vector["name"]) for vector in VECTORS.values()}
    first: dict[str, str] = {}
    for vector in VECTORS.values():
        first.setdefault(vector["key"], vector["name"])

    assert said == {vector["name"]: first[vector["key"]] for vector in VECTORS.values()}


def test_there_are_dozens_and_each_says_what_it_is_for():
    assert len(VECTORS) == len(generate.load()) >= 60
    assert all(vector["description"] for vector in VECTORS.values())


def test_generating_changes_nothing_that_is_pinned(tmp_path, monkeypatch, capsys):
    before = generate.FILE.read_text()
    copy = tmp_path / "keys.json"
    copy.write_text(before)
    monkeypatch.setattr(generate, "FILE", copy)

    assert generate.main() == 0
    assert copy.read_text() == before

    for name, field in [("ojs-example", "key"), ("idempotency-task", "fingerprint")]:
        vectors: list[dict[str, Any]] = json.loads(before)
        [changed] = [vector for vector in vectors if vector["name"] == name]
        changed[field] = "1:0"
        copy.write_text(json.dumps(vectors))
        assert generate.main() == 1
        assert name in capsys.readouterr().out


def test_the_vectors_on_the_page_are_those_pinned():
    row = re.compile(r"^\| `(\S+)` \| .* \| `(\{.*\})` \| `(1:[0-9a-f]{64})` \|$", re.MULTILINE)

    shown = [tuple(found) for found in row.findall(PAGE.read_text(encoding="utf-8"))]

    assert len(shown) >= 12
    assert shown == [(name, VECTORS[name]["text"], VECTORS[name]["key"]) for name, _, _ in shown]


def test_the_fingerprints_on_the_page_are_those_pinned():
    row = re.compile(r"^\| `(\S+)` \| `(\S+)` \| `(\{.*\})` \| `([0-9a-f]{32})` \|$", re.MULTILINE)

    shown = row.findall(PAGE.read_text(encoding="utf-8"))

    pinned = [VECTORS[name] for name, *_ in shown]
    assert len(shown) >= 4
    assert shown == [(v["name"], v["task"], v["arguments"], v["fingerprint"]) for v in pinned]
