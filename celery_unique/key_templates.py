"""What a user's ``unique_key`` makes of the arguments: a callable, or a format string."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from string import Formatter
from typing import Any, NamedTuple

from .canonical import NotCanonical, wire_form
from .exceptions import UniqueKeyError
from .messages import suggestion

__all__ = ["misfit", "own_key"]

_FORMATTER = Formatter()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Field(NamedTuple):
    literal: str
    name: str | None
    spec: str
    conversion: str | None


class _Takes(NamedTuple):
    """The parameters of a callable."""

    by_position: tuple[str, ...]  # and by no name
    by_name: tuple[str, ...]
    required: tuple[str, ...]
    everything: bool  # it has **kwargs


def own_key(
    unique_key: Callable[..., Any] | str, arguments: Mapping[str, Any], *, known: bool = True
) -> str:
    """Return the string that `unique_key` makes of `arguments`, which is name -> value.

    They are all of the task's arguments if they are `known`, else those that the call names.
    """
    if isinstance(unique_key, str):
        return _formatted(unique_key, arguments)
    takes = _takes(unique_key)
    wrong = _misfit(takes, arguments, known)
    if wrong is not None:
        raise UniqueKeyError(wrong[0], argument=wrong[1])
    try:
        made = _called(unique_key, takes, arguments)
    except Exception as error:
        by_name = ", every one by its name," if takes is None else ""
        raise UniqueKeyError(
            f"unique_key raised {type(error).__name__}. It is passed the arguments of the task"
            f"{by_name} and must return a string"
        ) from error
    if not isinstance(made, str):
        raise UniqueKeyError(
            f"unique_key returned a {type(made).__name__}; it must return a string"
        )
    return str.__str__(made)


# -- a callable ----------------------------------------------------------------------------------


def misfit(unique_key: Callable[..., Any], names: Collection[str]) -> str | None:
    """Return why a callable cannot be passed the arguments of these names; None if it can."""
    wrong = _misfit(_takes(unique_key), names, known=True)
    return None if wrong is None else wrong[0]


def _called(
    unique_key: Callable[..., Any], takes: _Takes | None, arguments: Mapping[str, Any]
) -> Any:
    if takes is None:
        return unique_key(**arguments)
    if _wants_mapping(takes, arguments):
        arguments = {**arguments, takes.required[0]: dict(arguments)}
    given = itertools.takewhile(arguments.__contains__, takes.by_position)
    positional = [arguments[name] for name in given]
    if takes.everything:
        rest = {name: arguments[name] for name in arguments if name not in takes.by_position}
    else:
        rest = {name: arguments[name] for name in takes.by_name if name in arguments}
    return unique_key(*positional, **rest)


def _wants_mapping(takes: _Takes, names: Collection[str]) -> bool:
    """Whether it asks for one thing, which is none of the arguments: that is all of them."""
    return len(takes.required) == 1 and takes.required[0] not in names and not takes.everything


def _misfit(
    takes: _Takes | None, names: Collection[str], known: bool
) -> tuple[str, str | None] | None:
    """Return what is wrong, and the parameter that is."""
    if takes is None or (known and _wants_mapping(takes, names)):
        return None
    missing = next((name for name in takes.required if name not in names), None)
    if missing is not None:
        return _missing(missing, names, known), missing
    parameters = (*takes.by_position, *takes.by_name)
    if takes.everything or not names or any(name in names for name in parameters):
        return None
    return _unused(parameters, names), parameters[0] if parameters else None


def _unused(parameters: tuple[str, ...], names: Collection[str]) -> str:
    has = f"only {_listed(parameters)}" if parameters else "no parameter"
    near = suggestion(parameters[0], names) if parameters else ""
    return (
        f"unique_key has {has}, so it is passed none of the arguments ({_listed(names)}) and "
        f"every call would have the same key.{near} Write it with the names of the arguments that "
        f"count, as in lambda {next(iter(names))}: ..., or use unique_by='type' if one key for the "
        "task is meant"
    )


def _missing(name: str, names: Collection[str], known: bool) -> str:
    listed = _listed(names) or "none that has a name"
    wrong = f"unique_key has the parameter {name!r}, but the arguments are {listed}."
    if name in ("self", "cls"):
        cure = "Make it a @staticmethod: it is called without the task"
    elif known:
        cure = (
            "Write it with the names of arguments, give that parameter a default, or write one "
            "parameter alone, which is passed the mapping of all arguments"
        )
    else:
        cure = f"Pass {name!r} by name, or write it with **arguments for those that the call names"
    return f"{wrong}{suggestion(name, names)} {cure}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _takes(unique_key: Callable[..., Any]) -> _Takes | None:
    """Return its parameters; None where it does not tell, as some that are written in C."""
    try:
        return _takes_once(unique_key)
    except TypeError:  # it cannot be hashed
        return _inspected(unique_key)


def _inspected(unique_key: Callable[..., Any]) -> _Takes | None:
    try:
        parameters = inspect.signature(unique_key).parameters.values()
    except (TypeError, ValueError):
        return None
    single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return _Takes(
        by_position=tuple(p.name for p in single if p.kind is p.POSITIONAL_ONLY),
        by_name=tuple(p.name for p in single if p.kind is not p.POSITIONAL_ONLY),
        required=tuple(p.name for p in single if p.default is p.empty),
        everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


#: A callable may be another one in each call, and is then kept alive here for a while.
_takes_once = functools.lru_cache(maxsize=256)(_inspected)


# -- a format string -----------------------------------------------------------------------------


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
            f"{suggestion(field.name, arguments)} Pass {field.name!r} by name, or take it out of "
            "unique_key",
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
