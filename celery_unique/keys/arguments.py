"""The arguments of a call: bound to the parameters of its task, and as plain values or text.

`inspect.Signature.bind` is not used: it takes longer than all other steps to a key, and up to
Python 3.12 it refuses ``f(a=1)`` for ``def f(a=0, /, **rest)``, which is a valid call.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json.encoder import JSONEncoder, encode_basestring
from typing import TYPE_CHECKING, Any

from celery_unique.exceptions import UniqueKeyError, suggestion

from .canonical import MAX_DEPTH, NotCanonical, canonical, wire_form

if TYPE_CHECKING:
    from celery_unique.policy.policy import UniquePolicy

    from .call import Call

_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)
_MOST_KNOWN = 4096
_known: dict[int, Parameters] = {}


class CannotBind(ValueError):
    """The arguments do not fit the signature; `argument` is the one that does not."""

    def __init__(self, reason: str, argument: str | None = None) -> None:
        super().__init__(reason)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Parameters:
    """A signature, taken apart once."""

    signature: inspect.Signature
    #: Those that take a positional argument, in order.
    positional: tuple[str, ...]
    #: Those that take a keyword argument.
    by_keyword: frozenset[str]
    required: frozenset[str]
    defaults: Mapping[str, Any]
    #: The canonical text of each default that has one.
    default_texts: Mapping[str, str]
    #: The names of ``*args`` and ``**kwargs``, if the signature has them.
    var_positional: str | None
    var_keyword: str | None
    #: Every name with the text before its value, in the order of the canonical text as far as names
    #: are ASCII.
    sorted_heads: tuple[tuple[str, str], ...]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return name -> value of what was given; ``*args`` and ``**kwargs`` only if not empty."""
        places = len(self.positional)
        bound = dict(zip(self.positional, args, strict=False))
        if len(args) > places:
            if self.var_positional is None:
                raise CannotBind(f"it takes {places} positional arguments, not {len(args)}")
            bound[self.var_positional] = args[places:]
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in self.by_keyword:
                extra[plain_name(name)] = value
            elif name in bound:
                raise CannotBind(f"argument {name!r} is given by position and by name", name)
            else:
                bound[plain_name(name)] = value
        if extra:
            bound[self._extra_goes_to(extra)] = extra
        if not self.required <= bound.keys():
            raise self._missing(bound)
        return bound

    def complete(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the task's body would see: `bound`, and the default of all the others."""
        empty: dict[str, Any] = {}
        if self.var_positional is not None:
            empty[self.var_positional] = ()
        if self.var_keyword is not None:
            empty[self.var_keyword] = {}
        return {**empty, **self.defaults, **bound}

    def _extra_goes_to(self, extra: Mapping[str, Any]) -> str:
        if self.var_keyword is None:
            name = next(iter(extra))
            raise CannotBind(f"it has no keyword parameter {name!r}", name)
        return self.var_keyword

    def _missing(self, bound: Mapping[str, Any]) -> CannotBind:
        names = sorted(self.required - bound.keys())
        return CannotBind(f"argument {', '.join(map(repr, names))} is missing", names[0])


def plain_name(name: Any) -> str:
    """Return the name of a keyword argument as a plain string."""
    if type(name) is str:
        return name
    if isinstance(name, str):
        return str.__str__(name)
    raise CannotBind(f"a keyword is a string, not a {type(name).__name__}")


def parameters_of(signature: inspect.Signature) -> Parameters:
    """Return the parts of `signature`, which are made only once for each signature."""
    # By identity: a signature cannot be hashed where a default cannot, nor be referred to weakly.
    # The entry keeps its signature alive, so no other one can get the same id.
    known = _known.get(id(signature))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[id(signature)] = _taken_apart(signature)
    return known


def _taken_apart(signature: inspect.Signature) -> Parameters:
    names: dict[Any, list[str]] = {kind: [] for kind in _KINDS}
    for parameter in signature.parameters.values():
        names[parameter.kind].append(parameter.name)
    alone, either, rest, keyword, extra = (names[kind] for kind in _KINDS)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return Parameters(
        signature=signature,
        positional=(*alone, *either),
        by_keyword=frozenset((*either, *keyword)),
        required=frozenset((*alone, *either, *keyword)) - defaults.keys(),
        defaults=defaults,
        default_texts=_texts(defaults),
        var_positional=rest[0] if rest else None,
        var_keyword=extra[0] if extra else None,
        sorted_heads=tuple((name, f'"{name}":') for name in sorted(signature.parameters)),
    )


def _texts(defaults: Mapping[str, Any]) -> dict[str, str]:
    # Made once, so that a mutable default that a body changes does not change keys.
    texts = {}
    for name, value in defaults.items():
        # A default such as a bare object() has no text, and then no argument equals it.
        with contextlib.suppress(NotCanonical):
            texts[name] = canonical(wire_form(value))
    return texts


_VALUE_CURE_WITH_KEY = "Pass a value that JSON can carry"
HEADER_CURE = "Pass a header whose value JSON can carry, or take it out of unique_meta"
VALUE_CURE = f"{_VALUE_CURE_WITH_KEY}, or name what makes the call unique with unique_key="


def all_arguments(call: Call, but: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return every argument, but those that equal their default, and those named."""
    parameters, bound = _bound(call)
    if but:
        bound = _without(bound, parameters, but)
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


def _without(
    bound: dict[str, Any], parameters: Parameters | None, names: tuple[str, ...]
) -> dict[str, Any]:
    extra = parameters.var_keyword if parameters is not None else None
    kept = {name: value for name, value in bound.items() if name not in names}
    if extra in kept:
        kept[extra] = {n: value for n, value in kept[extra].items() if n not in names}
        if not kept[extra]:
            del kept[extra]
    return kept


def given_argument(call: Call, name: str, default: Any) -> Any:
    """Return the argument of this name as it was given; the default of its parameter, or this."""
    parameters, bound = _bound(call)
    if parameters is None:
        return bound.get(name, default)
    known = _all_names(parameters, bound)
    return known.get(name, default)


def chosen_arguments(call: Call, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments that ``unique_on`` names, given or not, default or not."""
    parameters, bound = _bound(call)
    known = bound if parameters is None else _all_names(parameters, bound)
    return {name: plain(call, name, _chosen(call, name, known)) for name in names}


def visible_arguments(call: Call) -> dict[str, Any]:
    """Return what the task's body would see, for the user's ``unique_key``: nothing is encoded."""
    if call.signature is None:
        # unique_key decides what counts, so positional arguments need no names here.
        return _keywords(call)
    parameters, bound = _bound(call)
    if parameters is None:
        return bound
    # In the order of the signature, whatever that of the call: a user may write them as text.
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
    """Return the error of a call that has no key."""
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
        return False  # kept, so that canonical_text raises its error


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


# -- the short way for plain values -----------------------------------------------------
#
# `text_of_plain` returns the very text of ``canonical_text(identity(call, policy))``, made in one
# pass, or None where that has to decide: for anything that is not plain ASCII JSON, for a number
# that JavaScript writes differently from Python, and for a call that does not fit its signature.
# A key never depends on which of the two ways made it.

_ENCODE = JSONEncoder(
    sort_keys=True,
    separators=(",", ":"),
    ensure_ascii=False,
    allow_nan=False,
    check_circular=False,  # the walk before it counts the levels
).encode

#: Below it every whole number is a float of its own.
_EXACT = 2**53
_LEAVES = frozenset((str, int, bool, float, type(None)))
#: What Python writes as 1.0 or 1e-05 is 1 or 0.00001 in RFC 8785; all other numbers are equal in
#: both. In a string this may match too much, and then the other way is taken, and never too
#: little: a number directly follows one of these three characters.
_WRITTEN_OTHERWISE = re.compile(r"[\[:,]-?\d+(?:\.0[,\]}]|(?:\.\d+)?e)")


def text_of_plain(call: Call, policy: UniquePolicy) -> str | None:
    """Return the canonical text of the call's identity, or None: use `canonical_text`."""
    if policy.key is not None or policy.keys != ("type", "args") or policy.args_keys is not None:
        return None
    if policy.group is not None:
        return None
    try:
        arguments = _plain_arguments(call, policy.merge)
        if arguments is None:
            return None
        text = f'{{"args":{{{arguments}}},"type":{encode_basestring(call.task_name)}}}'
    except (CannotBind, TypeError, ValueError, RecursionError):
        return None  # canonical_text raises the error
    return text if text.isascii() else None


def _plain_arguments(call: Call, but: tuple[str, ...] | None) -> str | None:
    if call.signature is None:
        return None
    parameters = parameters_of(call.signature)
    bound = parameters.bind(call.args, call.kwargs)
    if but:
        bound = _without(bound, parameters, but)
    members = []
    for name, head in parameters.sorted_heads:
        if name not in bound:
            continue
        value = bound[name]
        if name in parameters.defaults and value is parameters.defaults[name]:
            continue
        text = _plain_text(value)
        if text is None:
            return None
        if parameters.default_texts.get(name) != text:
            members.append(head + text)
    return ",".join(members)


def _plain_text(value: Any) -> str | None:
    kind = type(value)
    if kind is str:
        return encode_basestring(value)
    if kind is int:
        return int.__repr__(value)
    if kind is bool:
        return "true" if value else "false"
    if value is None:
        return "null"
    if kind is float:
        text = float.__repr__(value)
        return None if "e" in text or "n" in text or text.endswith(".0") else text
    if not _is_plain(value, MAX_DEPTH):
        return None
    text = _ENCODE(value)
    if not _WRITTEN_OTHERWISE.search(text):
        return text
    text = _ENCODE(_whole_as_int(value))
    return None if _WRITTEN_OTHERWISE.search(text) else text


def _is_plain(value: Any, room: int) -> bool:
    """Whether this holds nothing but exact JSON types, with strings as names."""
    if room <= 0:
        return False
    kind = type(value)
    if kind is dict:
        # Names that are numbers would be sorted as numbers.
        for name, member in value.items():
            if type(name) is not str:
                return False
            if type(member) not in _LEAVES and not _is_plain(member, room - 1):
                return False
        return True
    if kind is list or kind is tuple:
        for item in value:
            if type(item) not in _LEAVES and not _is_plain(item, room - 1):
                return False
        return True
    return False


def _whole_as_int(value: Any) -> Any:
    """Return plain values with 2.0 as 2, which is how it is written."""
    kind = type(value)
    if kind is float:
        return int(value) if -_EXACT < value < _EXACT and value.is_integer() else value
    if kind is dict:
        return {name: _whole_as_int(member) for name, member in value.items()}
    if kind is list or kind is tuple:
        return [_whole_as_int(item) for item in value]
    return value
