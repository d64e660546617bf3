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

from celery_unique.keys import KEY_VERSION, key_of
from tests.vectors import generate

VECTORS = {vector["name"]: vector for vector in generate.load()}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "key-format.md"

each = pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)


@each
def test_text_and_key_are_those_pinned(vector):
    text = generate.text_of(vector)

    assert text == vector["text"]
    assert key_of(text, vector.get("secret")) == vector["key"]


@each
def test_the_pinned_key_is_a_plain_digest_of_the_pinned_text(vector):
    # Without a line of ours, so that whoever reads the file can do the same.
    text, secret = vector["text"].encode(), vector.get("secret")
    if secret is None:
        digest = hashlib.sha256(text).hexdigest()
    else:
        digest = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()

    assert vector["key"] == f"{KEY_VERSION}:{digest}"


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

    vectors: list[dict[str, Any]] = json.loads(before)
    vectors[0]["key"] = "1:0"
    copy.write_text(json.dumps(vectors))
    assert generate.main() == 1
    assert vectors[0]["name"] in capsys.readouterr().out


def test_the_vectors_on_the_page_are_those_pinned():
    row = re.compile(r"^\| `(\S+)` \| .* \| `(\{.*\})` \| `(1:[0-9a-f]{64})` \|$", re.MULTILINE)

    shown = [tuple(found) for found in row.findall(PAGE.read_text(encoding="utf-8"))]

    assert len(shown) >= 12
    assert shown == [(name, VECTORS[name]["text"], VECTORS[name]["key"]) for name, _, _ in shown]
