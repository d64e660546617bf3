"""The option ``unique_key``: a callable or a format string that makes a key from arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from string import Formatter
from typing import Any, NamedTuple

from celery_unique.exceptions import UniqueKeyError, suggestion

from .canonical import NotCanonical, wire_form

__all__ = ["misfit", "own_key", "text_for_operators"]

#: A label is a few words.
LONGEST_LABEL = 80

_FORMATTER = Formatter()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


#: Names of the one parameter that is passed the mapping of all arguments. Any other name is that
#: of an argument, misspelled or of another task.
_MAPPING_NAMES = ("arguments", "args", "kwargs", "params", "parameters")


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


class _Plan(NamedTuple):
    """How a callable is passed arguments of certain names; or why it cannot be."""

    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    #: The parameter for the mapping of all arguments.
    mapping: str | None = None
    wrong: str | None = None
    wrong_parameter: str | None = None


def own_key(
    unique_key: Callable[..., Any] | str,
    arguments: Mapping[str, Any],
    *,
    known: bool = True,
    option: str = "unique_key",
) -> str:
    """Return the string that `unique_key` makes of `arguments`, which is name -> value.

    They are all of the task's arguments if they are `known`, else those that the call names.
    `option` is the name of the option, for an error.
    """
    if isinstance(unique_key, str):
        return _formatted(unique_key, arguments, option)
    plan = _plan(unique_key, tuple(arguments), known)
    if plan.wrong is not None:
        raise UniqueKeyError(plan.wrong, argument=plan.wrong_parameter)
    try:
        made = _called(unique_key, plan, arguments)
    except Exception as error:
        raise UniqueKeyError(
            f"unique_key raised {type(error).__name__}. It is passed the arguments of the task and "
            "must return a string"
        ) from error
    if not isinstance(made, str):
        raise UniqueKeyError(
            f"unique_key returned a {type(made).__name__}; it must return a string"
        )
    return str.__str__(made)


def text_for_operators(template: str, arguments: Mapping[str, Any]) -> str:
    """The text of ``unique_label``, in one line. An argument that it cannot show is left out: no
    call fails for a text that only people read."""
    parts = []
    for field in _fields(template):
        parts.append(field.literal)
        if field.name is not None and field.name in arguments:
            with suppress(Exception):
                value = _FORMATTER.convert_field(arguments[field.name], field.conversion)
                parts.append(format(value, field.spec))
    line = "".join(character if character.isprintable() else " " for character in "".join(parts))
    return line[:LONGEST_LABEL]


# -- a callable ----------------------------------------------------------------------------------


def misfit(unique_key: Callable[..., Any], names: Iterable[str]) -> str | None:
    """Return why a callable cannot be passed the arguments of these names; None if it can."""
    return _plan(unique_key, tuple(names), known=True).wrong


def _called(unique_key: Callable[..., Any], plan: _Plan, arguments: Mapping[str, Any]) -> Any:
    if plan.mapping is not None:
        arguments = {**arguments, plan.mapping: dict(arguments)}
    return unique_key(
        *[arguments[name] for name in plan.positional],
        **{name: arguments[name] for name in plan.named},
    )


def _plan(unique_key: Callable[..., Any], names: tuple[str, ...], known: bool) -> _Plan:
    try:
        return _plan_once(unique_key, names, known)
    except TypeError:  # it cannot be hashed
        return _make_plan(unique_key, names, known)


def _make_plan(unique_key: Callable[..., Any], names: tuple[str, ...], known: bool) -> _Plan:
    takes = _takes(unique_key)
    if takes is None:
        return _Plan(named=names)
    missing = [name for name in takes.required if name not in names]
    mapping = None
    if known and missing and _takes_mapping(takes):
        mapping, names = missing.pop(), (*names, *takes.required)
    if missing:
        return _Plan(wrong=_missing(missing[0], names, known), wrong_parameter=missing[0])
    parameters = (*takes.by_position, *takes.by_name)
    if names and not takes.everything and not any(name in names for name in parameters):
        wrong_parameter = parameters[0] if parameters else None
        return _Plan(wrong=_unused(parameters, names), wrong_parameter=wrong_parameter)
    return _Plan(
        positional=tuple(itertools.takewhile(names.__contains__, takes.by_position)),
        named=tuple(
            name
            for name in (names if takes.everything else takes.by_name)
            if name in names and name not in takes.by_position
        ),
        mapping=mapping,
    )


def _takes_mapping(takes: _Takes) -> bool:
    """Whether its only required parameter, which is no argument, is for the mapping of all."""
    if len(takes.required) != 1 or takes.everything:
        return False
    return takes.required[0] in (*_MAPPING_NAMES, *takes.by_position)


#: A callable that is a new one in each call is kept alive here for a while.
_plan_once = functools.lru_cache(maxsize=512)(_make_plan)


def _unused(parameters: tuple[str, ...], names: tuple[str, ...]) -> str:
    has = f"only {_listed(parameters)}" if parameters else "no parameter"
    near = suggestion(parameters[0], names) if parameters else ""
    return (
        f"unique_key has {has}, so it is passed none of the arguments ({_listed(names)}) and "
        f"every call would have the same key.{near} Write it with the names of the arguments that "
        f"count, as in lambda {names[0]}: ..., or use unique_by='type' if one key for the "
        "task is meant"
    )


def _missing(name: str, names: tuple[str, ...], known: bool) -> str:
    listed = _listed(names) or "none that has a name"
    wrong = f"unique_key has the parameter {name!r}, but the arguments are {listed}."
    if name in ("self", "cls"):
        cure = "Make it a @staticmethod: it is called without the task"
    elif known:
        cure = (
            "Write it with the names of arguments, give that parameter a default, or call it "
            "'arguments' and write it alone: that is passed the mapping of all arguments"
        )
    else:
        cure = f"Pass {name!r} by name, or write it with **arguments for those that the call names"
    return f"{wrong}{suggestion(name, names)} {cure}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _takes(unique_key: Callable[..., Any]) -> _Takes | None:
    """Return its parameters; None where it has no signature, as some written in C."""
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


# -- a format string -----------------------------------------------------------------------------


def _formatted(template: str, arguments: Mapping[str, Any], option: str) -> str:
    return "".join([_filled(field, arguments, option) for field in _fields(template)])


@functools.lru_cache(maxsize=1024)
def _fields(template: str) -> tuple[_Field, ...]:
    """The parts of a format string, which its policy has checked (``policy.fields``)."""
    return tuple(
        _Field(literal, name, spec or "", conversion)
        for literal, name, spec, conversion in _FORMATTER.parse(template)
    )


def _filled(field: _Field, arguments: Mapping[str, Any], option: str) -> str:
    if field.name is None:
        return field.literal
    if field.name not in arguments:
        known = ", ".join(map(repr, arguments)) or "none that has a name"
        raise UniqueKeyError(
            f"{option} names {field.name!r}, but the arguments are {known}."
            f"{suggestion(field.name, arguments)} Pass {field.name!r} by name, or take it out of "
            f"{option}",
            argument=field.name,
        )
    return field.literal + _shown(field, field.name, arguments[field.name], option)


def _shown(field: _Field, name: str, value: Any, option: str) -> str:
    try:
        text = format(_FORMATTER.convert_field(value, field.conversion), field.spec)
    except Exception as error:
        raise UniqueKeyError(
            f"{option} cannot show argument {name!r} ({type(error).__name__})", argument=name
        ) from error
    if _ADDRESS.search(text) and not _has_wire_form(value):
        raise UniqueKeyError(
            f"{option} cannot show argument {name!r}: a {type(value).__name__} is shown by its "
            "address, which differs in each process. Give a callable that returns the "
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
