"""What a user's ``unique_key`` makes of the arguments: a callable, or a format string."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any, NamedTuple

from .canonical import NotCanonical, wire_form
from .exceptions import UniqueKeyError
from .messages import suggestion

__all__ = ["own_key"]

_FORMATTER = Formatter()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Field(NamedTuple):
    literal: str
    name: str | None
    spec: str
    conversion: str | None


def own_key(unique_key: Callable[..., Any] | str, arguments: Mapping[str, Any]) -> str:
    """Return the string that `unique_key` makes of `arguments`, which is name -> value."""
    if isinstance(unique_key, str):
        return _formatted(unique_key, arguments)
    try:
        made = unique_key(**arguments)
    except Exception as error:
        raise UniqueKeyError(
            f"unique_key raised {type(error).__name__}. It is called with every argument of the "
            "task by name and must return a string"
        ) from error
    if not isinstance(made, str):
        raise UniqueKeyError(
            f"unique_key returned a {type(made).__name__}; it must return a string"
        )
    return str.__str__(made)


def _formatted(template: str, arguments: Mapping[str, Any]) -> str:
    return "".join([_filled(field, arguments) for field in _fields(template)])


@functools.lru_cache(maxsize=1024)
def _fields(template: str) -> tuple[_Field, ...]:
    try:
        parts = list(_FORMATTER.parse(template))
    except ValueError as error:
        raise UniqueKeyError(f"unique_key is no format string: {error}") from None
    return tuple(
        _Field(literal, _plain_field(name, spec or ""), spec or "", conversion)
        for literal, name, spec, conversion in parts
    )


def _plain_field(name: str | None, spec: str) -> str | None:
    # Names alone: "{user.password}" would reach into objects, "{0}" has no name, and "{a:{b}}"
    # hides a second one.
    if name is None or (name.isidentifier() and "{" not in spec):
        return name
    raise UniqueKeyError(
        f"unique_key holds the field {name!r}, but it may hold only names of arguments, such as "
        "'{shop_id}'. For anything else give a callable that returns the string"
    )


def _filled(field: _Field, arguments: Mapping[str, Any]) -> str:
    if field.name is None:
        return field.literal
    if field.name not in arguments:
        known = ", ".join(map(repr, arguments)) or "none that has a name"
        raise UniqueKeyError(
            f"unique_key names {field.name!r}, but the arguments are {known}."
            f"{suggestion(field.name, arguments)}",
            argument=field.name,
        )
    return field.literal + _shown(field, field.name, arguments[field.name])


def _shown(field: _Field, name: str, value: Any) -> str:
    try:
        text = format(_FORMATTER.convert_field(value, field.conversion), field.spec)
    except Exception as error:
        raise UniqueKeyError(
            f"unique_key cannot show argument {name!r} ({type(error).__name__})", argument=name
        ) from error
    if _ADDRESS.search(text) and not _has_wire_form(value):
        raise UniqueKeyError(
            f"unique_key cannot show argument {name!r}: a {type(value).__name__} is shown by its "
            "address, which is another one in each process. Give a callable that returns the "
            "string",
            argument=name,
        )
    return text


def _has_wire_form(value: Any) -> bool:
    try:
        wire_form(value)
    except NotCanonical:
        return False
    return True
