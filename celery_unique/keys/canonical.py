"""The canonical text of a value, in two steps.

`wire_form` returns what kombu's JSON serializer would send, as plain JSON values: values that are
equal for a worker are equal here.  `canonical` writes plain JSON values as in RFC 8785, with two
rules of our own: strings are NFC, and an integer beyond 2**53-1 is its digits.
"""

from __future__ import annotations

import json
from base64 import b64encode
from json.encoder import encode_basestring
from math import isfinite
from typing import Any
from unicodedata import is_normalized, normalize

import rfc8785
from kombu.utils.json import JSONEncoder

__all__ = ["MAX_DEPTH", "NotCanonical", "canonical", "wire_form"]

#: How deep the value of one argument may be nested.  A limit of our own: Python's depends on how
#: deep the caller already is, and a call must not have a key in one place and none in another.
MAX_DEPTH = 200

_NOT_FINITE = "NaN or an infinity, which JSON does not have"
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels, or refers to itself"

# Messages of the json module name types, never values; other messages may quote a value.
_MESSAGES_OF_JSON = ("Object of type", "keys must be", "Circular", "Exceeds the")


class NotCanonical(ValueError):
    """A value has no canonical text; the message is a predicate: "has no JSON form"."""


def wire_form(value: Any) -> Any:
    """Return `value` as plain JSON values, as a worker would see them before it decodes types."""
    if _is_plain(value):
        return value
    try:
        return _DECODER.decode(_ENCODER.encode(value))
    except NotCanonical:
        raise
    except RecursionError:
        raise NotCanonical(_TOO_DEEP) from None
    # `__json__` and encoders given to kombu's register_type are users' code and may raise anything.
    except Exception as error:
        if _is_not_finite(error):
            is_it = "is" if isinstance(value, float) else "holds"
            raise NotCanonical(f"{is_it} {_NOT_FINITE}") from None
        raise NotCanonical(f"has no JSON form ({_described(error)})") from error


def _is_plain(value: Any) -> bool:
    """Whether `value` is its own wire form, for the most frequent types."""
    kind = type(value)
    if kind is str:
        return str.isascii(value)  # a pair of surrogates is one character on the wire
    return kind is int or kind is bool or value is None or (kind is float and isfinite(value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # {1: ..., "1": ...}: the worker would get one of the two.
        raise NotCanonical("has two object keys that are one key in JSON")
    return _exact_bytes(found) if found.get("__type__") == "bytes" else found


def _exact_bytes(found: dict[str, Any]) -> dict[str, Any]:
    """Return kombu's other form of bytes for those that NFC would make into other bytes."""
    text = found.get("__value__")
    if len(found) != 2 or not isinstance(text, str) or is_normalized("NFC", text):
        return found
    return {"__type__": "base64", "__value__": b64encode(text.encode()).decode()}


def _is_not_finite(error: Exception) -> bool:
    return isinstance(error, ValueError) and _message(error).startswith("Out of range float")


def _described(error: Exception) -> str:
    message = _message(error)
    return message if message.startswith(_MESSAGES_OF_JSON) else type(error).__name__


def _message(error: Exception) -> str:
    message = error.args[0] if error.args else None
    return message if isinstance(message, str) else ""


_ENCODER = JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def canonical(value: Any) -> str:
    """Return the canonical text of plain JSON values."""
    try:
        # Two levels more: an argument is inside the object "args" of the identity.
        text = _text(value, MAX_DEPTH + 2)
    except RecursionError:
        raise NotCanonical(_TOO_DEEP) from None
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            # Without the cause: it carries the whole text.
            raise NotCanonical("holds a lone surrogate, which is no character") from None
    return text


def _text(value: Any, room: int) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring(value if value.isascii() else normalize("NFC", value))
    if kind is int:
        return _digits(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is float:
        return _number(value)
    if room <= 0:
        raise NotCanonical(_TOO_DEEP)
    if kind is dict:
        members = [f"{encode_basestring(k)}:{_text(v, room - 1)}" for k, v in _members(value)]
        return "{" + ",".join(members) + "}"
    if kind is list or kind is tuple:
        return "[" + ",".join([_text(item, room - 1) for item in value]) + "]"
    if isinstance(value, str):
        return _text(str.__str__(value), room)
    raise NotCanonical(f"has no JSON form (a {kind.__name__})")


def _members(value: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the members of an object, names NFC, in the order of RFC 8785."""
    try:
        if all(map(str.isascii, value)):
            return sorted(value.items(), key=_name)
        named = {normalize("NFC", name): member for name, member in value.items()}
    except TypeError:
        raise NotCanonical("has an object key that is no string") from None
    if len(named) != len(value):
        raise NotCanonical("has two object keys that are one text in Unicode's NFC form")
    return sorted(named.items(), key=_utf16)


def _name(member: tuple[str, Any]) -> str:
    return member[0]


def _utf16(member: tuple[str, Any]) -> bytes:
    # Code units, not code points: U+FF21 sorts after U+1F600.  Surrogates are refused at the end.
    return member[0].encode("utf-16-be", "surrogatepass")


def _digits(value: int) -> str:
    try:
        return int.__repr__(value)
    except ValueError:
        raise NotCanonical("holds an integer of more digits than Python writes") from None


def _number(value: float) -> str:
    try:
        return rfc8785.dumps(value).decode()
    except rfc8785.FloatDomainError:
        raise NotCanonical(f"holds {_NOT_FINITE}") from None
