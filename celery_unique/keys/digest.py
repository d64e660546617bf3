"""From the canonical text of a call to its key: version and digest."""

from __future__ import annotations

import hashlib
import hmac
import json

from celery_unique.exceptions import UniqueKeyError

#: Before the digest. Any change to what is hashed, or how, is a new version.
KEY_VERSION = "1"
#: How often an id may have been handed on, where that is not known.
_DEEPEST = 10
#: The part of a key that is shown: its version and 12 of its 64 hexadecimal digits.
SHORT_KEY = 14


def key_of(text: str, secret: str | bytes | None = None) -> str:
    """Return the key of a canonical text; with `secret`, arguments cannot be guessed from it."""
    return f"{KEY_VERSION}:{digest(text, secret)}"


def digest(text: str, secret: str | bytes | None) -> str:
    """Return the SHA-256 of `text`, or its HMAC."""
    if secret is None:
        return hashlib.sha256(text.encode()).hexdigest()
    if not secret:
        raise UniqueKeyError("The secret of unique keys is empty: set one, or leave it unset")
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(key, text.encode(), "sha256").hex()


def guard_key(task_id: str, nesting: int = 0) -> str:
    """Return the key under which the deliveries of one task id are guarded.

    `nesting` counts how often the id was handed to another task (``self.replace``): that one is
    no second delivery of the first.
    """
    return key_of(guard_text(task_id, nesting))


def guard_text(task_id: str, nesting: int = 0) -> str:
    """Return the text that a guard's key is the digest of; no call has such a text."""
    behind = f',"nesting":{nesting}' if nesting else ""
    return f'{{"guard":{json.dumps(task_id)}{behind}}}'


def guarded_by(key: str, task_id: str) -> str | None:
    """Return the text of a key that guards this id; None if it is the key of a call."""
    texts = (guard_text(task_id, nesting) for nesting in range(_DEEPEST))
    return next((text for text in texts if key_of(text) == key), None)


def short_key(key: str) -> str:
    """Return the part of a key that distinguishes it from others and cannot replace it."""
    return key[:SHORT_KEY]
