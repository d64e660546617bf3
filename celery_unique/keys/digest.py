"""From a call and a policy to its key, in three pure steps.

`identity` collects what makes the call unique, `canonical_text` writes it as the one text that
stands for it (readable: it is what ``celery unique why`` shows), `key_of` hashes that text.
``docs/reference/key-format.md`` is the normative description.
"""

from __future__ import annotations

import hashlib
import hmac

from celery_unique.exceptions import UniqueKeyError

#: How much of a key is shown to people: its version and 12 of its 64 hexadecimal digits.
SHORT_KEY = 14


def short_key(key: str) -> str:
    """Enough of a key to tell it from others, and too little to stand for it."""
    return key[:SHORT_KEY]


#: Stands before the digest.  Any change to what is hashed, or how, is a new version.
KEY_VERSION = "1"


def key_of(text: str, secret: str | bytes | None = None) -> str:
    """Return the key of a canonical text; with `secret` arguments cannot be guessed from it."""
    return f"{KEY_VERSION}:{_digest(text, secret)}"


def _digest(text: str, secret: str | bytes | None) -> str:
    if secret is None:
        return hashlib.sha256(text.encode()).hexdigest()
    if not secret:
        raise UniqueKeyError("The secret of unique keys is empty: set one, or leave it unset")
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(key, text.encode(), "sha256").hex()
