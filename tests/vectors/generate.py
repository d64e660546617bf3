"""The vectors of keys: read them, and fill in what is missing.

``keys.json`` pins the canonical text and the key of many calls, and the fingerprint of those with
an idempotency key.  To add one, write its entry without ``text``, ``key``, ``arguments`` and
``fingerprint`` and run ``python -m tests.vectors.generate``: they are filled in.  **Read the texts
that it wrote**: nobody else says that they are right.  What is pinned is never changed within a key
version, so the script refuses to.

Fields of an entry: ``name`` and ``description``; ``task``; ``signature`` as in Python's ``def``,
null for a sender without the task's code; ``call``, the arguments as in a Python call; ``policy``,
fields of ``UniquePolicy``, with ``{"python": ...}`` for a callable; ``queue``; ``meta``;
``idempotency_key`` with ``scope``; ``secret``; ``same_as``, an entry with the same key.  Of a call
with an idempotency key ``arguments`` is the canonical text behind its ``fingerprint``.
"""

from __future__ import annotations

import datetime as dt
import decimal
import inspect
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from celery_unique.config.settings import UniqueSettings
from celery_unique.keys.arguments import all_arguments
from celery_unique.keys.call import Call
from celery_unique.keys.digest import key_of
from celery_unique.keys.identity import (
    Identity,
    canonical_text,
    idempotency_identity,
    identify,
    identity,
)
from celery_unique.policy.policy import UniquePolicy

FILE = Path(__file__).parent / "keys.json"
NAMES = {
    "Decimal": decimal.Decimal,
    "UUID": uuid.UUID,
    "date": dt.date,
    "datetime": dt.datetime,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "timezone": dt.timezone,
}


def load() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text())


def text_of(vector: dict[str, Any]) -> str:
    call, policy = call_of(vector), policy_of(vector)
    if call.idempotency_key is not None:
        return canonical_text(
            idempotency_identity(call, scope=vector["scope"], meta_keys=policy.meta_keys)
        )
    return canonical_text(identity(call, policy))


def identity_of(vector: dict[str, Any]) -> Identity:
    """What the library takes to the store for this call."""
    secret = vector.get("secret")
    settings = UniqueSettings(
        key_secret=None if secret is None else secret.encode(),
        idempotency_scope=vector.get("scope", "task"),
    )
    return identify(
        call_of(vector), policy_of(vector), settings.key_secret, settings.idempotency_scope
    )


def found_of(vector: dict[str, Any]) -> dict[str, str]:
    """What is pinned of a vector, as it is made now."""
    text = text_of(vector)
    found = {"text": text, "key": key_of(text, vector.get("secret"))}
    if "idempotency_key" in vector:
        found["arguments"] = canonical_text({"args": all_arguments(call_of(vector))})
        found["fingerprint"] = identity_of(vector).arguments
    return found


def call_of(vector: dict[str, Any]) -> Call:
    args, kwargs = eval(f"capture({vector['call']})", {**NAMES, "capture": _capture})
    return Call(
        vector["task"],
        args,
        kwargs,
        _signature(vector["signature"]),
        vector.get("queue", ""),
        vector.get("meta", {}),
        vector.get("idempotency_key"),
    )


def policy_of(vector: dict[str, Any]) -> UniquePolicy:
    fields = dict(vector.get("policy", {}))
    if isinstance(fields.get("key"), dict):
        fields["key"] = eval(fields["key"]["python"], dict(NAMES))
    return UniquePolicy(**fields)


def _capture(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _signature(source: str | None) -> inspect.Signature | None:
    if source is None:
        return None
    scope: dict[str, Any] = dict(NAMES)
    exec(f"def task{source}: ...", scope)
    return inspect.signature(scope["task"])


def main() -> int:
    vectors = load()
    for vector in vectors:
        found = found_of(vector)
        pinned = {field: vector.get(field, value) for field, value in found.items()}
        if pinned != found:
            print(f"{vector['name']}: pinned {pinned}, but found {found}")
            return 1
        if not found.keys() <= vector.keys():
            print(f"{vector['name']}: {vector['description']}", *found.values(), sep="\n    ")
        vector.update(found)
    FILE.write_text(json.dumps(vectors, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
