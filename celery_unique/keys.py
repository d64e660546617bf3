"""From a call and a policy to its key, in three pure steps.

`identity` collects what makes the call unique, `canonical_text` writes it as the one text that
stands for it (readable: it is what ``celery unique why`` shows), `key_of` hashes that text.
``docs/reference/key-format.md`` is the normative description.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import (
    HEADER_CURE,
    VALUE_CURE,
    all_arguments,
    chosen_arguments,
    cure,
    no_key,
    plain_header,
    visible_arguments,
)
from .canonical import NotCanonical, canonical
from .exceptions import UniqueKeyError
from .key_templates import own_key
from .plain_calls import text_of_plain

if TYPE_CHECKING:
    from .calls import Call
    from .policy import UniquePolicy

__all__ = [
    "KEY_VERSION",
    "arguments_fingerprint",
    "canonical_text",
    "idempotency_identity",
    "identity",
    "key_of",
    "text_of",
]

#: Stands before the digest.  Any change to what is hashed, or how, is a new version.
KEY_VERSION = "1"

_LONGEST_IDEMPOTENCY_KEY = 255
_MEMBERS = {"args": "argument", "meta": "header"}
#: What to do about a part of an identity that has no text, where it is not an argument.
_CURES = {
    "meta": HEADER_CURE,
    "key": "Change unique_key so that the string it returns can be encoded as UTF-8",
    "idempotency_key": "Pass an idempotency_key that can be encoded as UTF-8",
}
_LABELS = {"key": "the string that unique_key returned"}


def identity(call: Call, policy: UniquePolicy) -> dict[str, Any]:
    """Return what makes `call` unique under `policy`, as plain JSON values (OJS 4.1)."""
    found: dict[str, Any] = {"type": call.task_name}
    if "queue" in policy.keys:
        found["queue"] = call.queue
    if policy.key is not None:
        found["key"] = _own_key(call, policy.key)
    elif "args" in policy.keys:
        names = policy.args_keys
        found["args"] = all_arguments(call) if names is None else chosen_arguments(call, names)
    if "meta" in policy.keys:
        found["meta"] = {name: _header(call, name) for name in policy.meta_keys or ()}
    return found


def idempotency_identity(
    call: Call, *, scope: str = "task", meta_keys: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Return what makes `call` unique by its idempotency key, within its task or the whole app.

    With `meta_keys` the named headers are part of it: each tenant has keys of its own.
    """
    key = call.idempotency_key
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_IDEMPOTENCY_KEY:
        raise no_key(
            call,
            f"idempotency_key must be a string of 1 to {_LONGEST_IDEMPOTENCY_KEY} characters",
            "idempotency_key",
        )
    if scope not in ("app", "task"):
        raise ValueError(f"scope is 'task' or 'app', not {scope!r}")
    found: dict[str, Any] = {"idempotency_key": key}
    if scope == "task":
        found["type"] = call.task_name
    if meta_keys:
        found["meta"] = {name: _header(call, name) for name in meta_keys}
    return found


def canonical_text(identity: Mapping[str, Any], task_name: str | None = None) -> str:
    """Return the canonical text of an identity: RFC 8785, strings NFC, integers of any size.

    `task_name` is for an error, where the identity itself has none.
    """
    return _text(identity, task_name or identity.get("type"), VALUE_CURE)


def text_of(call: Call, policy: UniquePolicy) -> str:
    """Return the canonical text of what makes `call` unique, sooner where its values are plain."""
    text = text_of_plain(call, policy)
    return canonical_text(identity(call, policy)) if text is None else text


def key_of(text: str, secret: str | bytes | None = None) -> str:
    """Return the key of a canonical text; with `secret` nobody can guess arguments from it."""
    return f"{KEY_VERSION}:{_digest(text, secret)}"


def arguments_fingerprint(call: Call, *, secret: str | bytes | None = None) -> str:
    """Return a digest of all arguments, to tell a repeated call from another with the same key."""
    text = _text({"args": all_arguments(call)}, call.task_name, cure(call))
    return _digest(text, secret)


def _digest(text: str, secret: str | bytes | None) -> str:
    if secret is None:
        return hashlib.sha256(text.encode()).hexdigest()
    if not secret:
        raise UniqueKeyError("The secret of unique keys is empty: set one, or leave it unset")
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(key, text.encode(), "sha256").hex()


def _own_key(call: Call, unique_key: Callable[..., Any] | str) -> str:
    arguments = visible_arguments(call)
    try:
        return own_key(unique_key, arguments, known=call.signature is not None)
    except UniqueKeyError as error:
        raise no_key(call, str(error), error.argument) from error.__cause__


def _header(call: Call, name: str) -> Any:
    if name not in call.meta:
        raise no_key(
            call,
            f"unique_meta names the header {name!r}, which neither the call's headers nor its "
            "stamps nor the current request has. Pass it in headers=",
            name,
        )
    return plain_header(call, name, call.meta[name])


def _text(identity: Mapping[str, Any], task_name: str | None, cure: str) -> str:
    try:
        return canonical(dict(identity))
    except NotCanonical as error:
        # Which part it is gets looked for only now, so that good calls do not pay for it.
        found = _culprit(identity)
        name, label, reason = found[:3] if found else (None, "the identity", str(error))
        cure = found.cure or cure if found else cure
        whose = f"{task_name} gets no" if task_name else "No"
        raise UniqueKeyError(
            f"{whose} unique key: {label} {reason}. {cure}", argument=name
        ) from None


def _culprit(identity: Mapping[str, Any]) -> _Culprit | None:
    for dimension, name, label, part in _parts(identity):
        try:
            canonical(part)
        except NotCanonical as error:
            return _Culprit(name, label, str(error), _CURES.get(dimension))
    return None


class _Culprit(NamedTuple):
    name: str
    label: str
    reason: str
    cure: str | None  # None: that of an argument


def _parts(identity: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    # Each part stays inside as many objects as it was, since depth is one of the reasons.
    for dimension, value in identity.items():
        if dimension in _MEMBERS and isinstance(value, dict):
            for name, member in value.items():
                label = f"{_MEMBERS[dimension]} {name!r}"
                yield dimension, name, label, {dimension: {name: member}}
        label = _LABELS.get(dimension, repr(dimension))
        yield dimension, dimension, label, {dimension: value}
