"""The values of calls that are merged: from a call to its payload, and from payloads to a body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu.utils import json

from celery_unique.exceptions import UniqueKeyError, shown

from .arguments import given_argument, parameters_of
from .call import Call

_NOT_GIVEN = object()
#: As ``json.dumps`` of kombu, which makes an encoder for each call.
_encoded: Callable[[object], str] = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_loads: Callable[[str], Any] = json.loads


def merged_values(call: Call, names: tuple[str, ...]) -> str:
    """Return the lists of these parameters as JSON, in the wire form of a message; null for one
    that the call does not give."""
    lists = {name: _list_of(call, name) for name in names}
    try:
        return _encoded(lists)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        name = next((name for name in names if not _has_json(lists[name])), names[0])
        raise _wrong(call, name, f"has a value that JSON cannot carry ({error})") from None


def _list_of(call: Call, name: str) -> list[Any] | None:
    value = given_argument(call, name, _NOT_GIVEN)
    given = value is not _NOT_GIVEN and _is_given(call, name)
    if isinstance(value, (list, tuple)):
        return list(value) if given else None
    if not given and (value is _NOT_GIVEN or value is None):
        return None
    raise _wrong(call, name, f"is {shown(value)}, not a list")


def _is_given(call: Call, name: str) -> bool:
    if name in call.kwargs or call.signature is None:
        return True
    positional = parameters_of(call.signature).positional
    return name in positional[: len(call.args)]


def _has_json(values: list[Any] | None) -> bool:
    try:
        _encoded(values)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _wrong(call: Call, name: str, why: str) -> UniqueKeyError:
    return UniqueKeyError(
        f"{call.task_name} cannot be merged: argument {name!r} {why}. Pass a list of values that "
        "JSON can carry, or take it out of unique_merge",
        argument=name,
    )


def lists_in(
    payload: str, decoded: Callable[[str], str], signature: inspect.Signature | None
) -> dict[str, list[Any]]:
    """Return the lists of all calls of a payload, by the name of their parameter: of a call that
    does not give one, its default; nothing where no call does. ``decoded`` reads those that are
    stored encoded."""
    found: dict[str, list[list[Any] | None]] = {}
    for line in payload.splitlines():
        _, lists = _loads(line)
        for name, values in (_loads(decoded(lists)) if isinstance(lists, str) else lists).items():
            found.setdefault(name, []).append(values)
    defaults = parameters_of(signature).defaults if signature is not None else {}
    return {
        name: [value for values in each for value in _or_default(values, defaults.get(name))]
        for name, each in found.items()
        if any(values is not None for values in each)
    }


def _or_default(values: list[Any] | None, default: Any) -> Sequence[Any]:
    return values if values is not None else default or ()


def with_lists(
    signature: inspect.Signature | None,
    merged: Mapping[str, list[Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a body with these lists in place of its own."""
    given, named = list(args), dict(kwargs)
    parameters = parameters_of(signature) if signature is not None else None
    for name, values in merged.items():
        if name in named or parameters is None:
            named[name] = values
        elif name in parameters.positional:
            place = parameters.positional.index(name)
            if place < len(given):
                given[place] = values
            elif name in parameters.by_keyword:
                named[name] = values
            else:  # without a name, behind others that have defaults
                before = parameters.positional[len(given) : place]
                given += [parameters.defaults[other] for other in before]
                given.append(values)
        elif name in parameters.by_keyword or parameters.var_keyword is not None:
            named[name] = values
        # else: another task continues under this id (``self.replace``)
    return tuple(given), named
