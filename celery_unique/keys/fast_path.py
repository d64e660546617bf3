"""The canonical text of a call whose arguments are plain JSON values, made in one pass.

`text_of_plain` gives the very text of ``canonical_text(identity(call, policy))``, or None where
that has to decide: for anything that is not plain ASCII JSON, for a number that JavaScript writes
in another way than Python, and for a call that does not fit its signature. It guesses nothing,
so a key never depends on which of the two ways made it.
"""

from __future__ import annotations

import re
from json.encoder import JSONEncoder, encode_basestring
from typing import TYPE_CHECKING, Any

from .arguments import CannotBind, Parameters, parameters_of
from .canonical import MAX_DEPTH

if TYPE_CHECKING:
    from celery_unique.policy.policy import UniquePolicy

    from .call import Call

__all__ = ["text_of_plain"]

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
#: What Python writes as 1.0 or 1e-05 is 1 or 0.00001 in RFC 8785. All other numbers are the same
#: in both. In a string this finds too much, and then the other way is taken: never too little,
#: since a number follows one of these three characters and nothing stands in between.
_WRITTEN_OTHERWISE = re.compile(r"[\[:,]-?\d+(?:\.0[,\]}]|(?:\.\d+)?e)")


def text_of_plain(call: Call, policy: UniquePolicy) -> str | None:
    """Return the canonical text of the call's identity, or None: ask `canonical_text`."""
    if policy.key is not None or policy.keys != ("type", "args") or policy.args_keys is not None:
        return None
    try:
        arguments = _arguments(call)
        if arguments is None:
            return None
        text = f'{{"args":{{{arguments}}},"type":{encode_basestring(call.task_name)}}}'
    except (CannotBind, TypeError, ValueError, RecursionError):
        return None  # the other way says what is wrong, and where
    return text if text.isascii() else None


def _arguments(call: Call) -> str | None:
    if call.signature is None:
        return None
    parameters = parameters_of(call.signature)
    bound = parameters.bind(call.args, call.kwargs)
    members = []
    for name, head in parameters.sorted_heads:
        if name not in bound:
            continue
        value = bound[name]
        if name in parameters.defaults and value is parameters.defaults[name]:
            continue
        text = _text(value)
        if text is None:
            return None
        if not _is_default(parameters, name, text):
            members.append(head + text)
    return ",".join(members)


def _is_default(parameters: Parameters, name: str, text: str) -> bool:
    return name in parameters.default_texts and parameters.default_texts[name] == text


def _text(value: Any) -> str | None:
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
