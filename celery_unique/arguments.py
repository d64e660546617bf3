"""The arguments of a call by name, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .binding import CannotBind, Parameters, parameters_of, plain_name
from .canonical import NotCanonical, canonical, wire_form
from .exceptions import UniqueKeyError
from .messages import suggestion

if TYPE_CHECKING:
    from .calls import Call

__all__ = [
    "HEADER_CURE",
    "VALUE_CURE",
    "all_arguments",
    "chosen_arguments",
    "cure",
    "no_key",
    "plain",
    "plain_header",
    "visible_arguments",
]

_VALUE_CURE_WITH_KEY = "Pass a value that JSON can carry"
HEADER_CURE = "Pass a header whose value JSON can carry, or take it out of unique_meta"
VALUE_CURE = f"{_VALUE_CURE_WITH_KEY}, or name what makes the call unique with unique_key="


def all_arguments(call: Call) -> dict[str, Any]:
    """Return every argument, but those that equal their default."""
    parameters, bound = _bound(call)
    if parameters is None or not parameters.defaults:
        return {name: plain(call, name, value) for name, value in bound.items()}
    kept = {}
    for name, value in bound.items():
        if name in parameters.defaults and value is parameters.defaults[name]:
            continue
        wire = plain(call, name, value)
        if name in parameters.default_texts and _is_text(wire, parameters.default_texts[name]):
            continue
        kept[name] = wire
    return kept


def chosen_arguments(call: Call, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments that ``unique_on`` names, given or not, default or not."""
    parameters, bound = _bound(call)
    known = bound if parameters is None else _all_names(parameters, bound)
    return {name: plain(call, name, _chosen(call, name, known)) for name in names}


def visible_arguments(call: Call) -> dict[str, Any]:
    """Return what the task's body would see, for the user's ``unique_key``: nothing is encoded."""
    if call.signature is None:
        # The user says what the key is made of, so positional arguments need no names here.
        return _keywords(call)
    parameters, bound = _bound(call)
    if parameters is None:
        return bound
    # In the order of the signature, whatever that of the call: somebody will make a text of them.
    seen = parameters.complete(bound)
    return {name: seen[name] for name in call.signature.parameters}


def plain(call: Call, name: str, value: Any) -> Any:
    """Return `value` as plain JSON values."""
    try:
        return wire_form(value)
    except NotCanonical as error:
        raise no_key(call, f"argument {name!r} {error}. {cure(call)}", name) from error.__cause__


def plain_header(call: Call, name: str, value: Any) -> Any:
    """Return the value of a header as plain JSON values."""
    try:
        return wire_form(value)
    except NotCanonical as error:
        raise no_key(call, f"header {name!r} {error}. {HEADER_CURE}", name) from error.__cause__


def cure(call: Call) -> str:
    """Return what to do about a value of `call` that has no canonical text."""
    # unique_key= does not help where the arguments are only compared, beside an idempotency key.
    return VALUE_CURE if call.idempotency_key is None else _VALUE_CURE_WITH_KEY


def no_key(call: Call, reason: str, argument: str | None) -> UniqueKeyError:
    """Return the error that says why `call` gets no key."""
    return UniqueKeyError(f"{call.task_name} gets no unique key: {reason}", argument=argument)


def _bound(call: Call) -> tuple[Parameters | None, dict[str, Any]]:
    try:
        if call.signature is not None:
            parameters = parameters_of(call.signature)
            return parameters, parameters.bind(call.args, call.kwargs)
        if call.args:
            raise CannotBind(_unnamed(call))
        return None, _keywords(call)
    except CannotBind as error:
        raise no_key(call, f"{error}{_fitting(call)}", error.argument) from None


def _keywords(call: Call) -> dict[str, Any]:
    try:
        return {plain_name(name): value for name, value in call.kwargs.items()}
    except CannotBind as error:
        raise no_key(call, str(error), error.argument) from None


def _fitting(call: Call) -> str:
    return "" if call.signature is None else f". Pass arguments that fit {call.signature}"


def _unnamed(call: Call) -> str:
    own_key = ", or unique_key=" if call.idempotency_key is None else ""
    return (
        "the sender has no code of the task, so its positional arguments have no names. "
        f"Pass keyword arguments{own_key}, or import the task"
    )


def _is_text(wire: Any, text: str) -> bool:
    # Never by ==: 1 == True, but they are two keys; and an array's == is not even a bool.
    try:
        return canonical(wire) == text
    except NotCanonical:
        return False  # kept, so that canonical_text says what is wrong with it


def _all_names(parameters: Parameters, bound: Mapping[str, Any]) -> dict[str, Any]:
    # A parameter goes before an extra keyword of the same name: def f(a, /, **rest), f(1, a=2).
    extra = bound.get(parameters.var_keyword, {}) if parameters.var_keyword else {}
    return {**extra, **parameters.complete(bound)}


def _chosen(call: Call, name: str, known: Mapping[str, Any]) -> Any:
    if name in known:
        return known[name]
    names = ", ".join(map(repr, known)) or "none that has a name"
    raise no_key(
        call,
        f"unique_on names {name!r}, but the arguments are {names}.{suggestion(name, known)} "
        f"Pass {name!r} by name, or take it out of unique_on",
        name,
    )
