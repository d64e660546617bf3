"""Which argument of a call belongs to which parameter of the task.

`inspect.Signature.bind` would do, but it takes longer than all the rest of making a key, and up to
Python 3.12 it refuses ``f(a=1)`` for ``def f(a=0, /, **rest)``, which is a good call.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .canonical import NotCanonical, canonical, wire_form

__all__ = ["CannotBind", "Parameters", "parameters_of", "plain_name"]

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
    #: Every name with the text that stands before its value, in the order of the canonical text
    #: as far as names are ASCII.
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
    # Made once, so a mutable default that the body changes does not change keys on the way.
    texts = {}
    for name, value in defaults.items():
        # A default such as a bare object() has no text, and then no argument equals it.
        with contextlib.suppress(NotCanonical):
            texts[name] = canonical(wire_form(value))
    return texts
