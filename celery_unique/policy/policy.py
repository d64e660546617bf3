"""What makes a call a duplicate, and what is then done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from celery_unique.exceptions import (
    InvalidPolicy,
    UniquePolicyWarning,
    one_of,
    shown,
    suggestion,
    warn_user,
)

from .durations import parse_ojs_duration, to_iso8601
from .fields import (
    CHECKS,
    CONFLICT_STRATEGIES,
    DEFAULTS,
    OPTION_OF,
    REPLACING,
    check_choice,
    label,
    names_in_format,
)
from .states import GROUPS, explain_gaps

__all__ = [
    "UniquePolicy",
    "UniquePolicyWarning",
    "ojs_fields",
    "warn_of_ignored_arguments",
    "warn_of_short_window",
    "warn_of_window_alone",
    "warn_once",
]

OJS_FIELDS = ("keys", "args_keys", "meta_keys", "period", "states", "on_conflict")
OJS_CONFLICT_STRATEGIES = ("reject", "replace", "replace_except_schedule", "ignore")
_OUR_STRATEGIES = set(CONFLICT_STRATEGIES).difference(OJS_CONFLICT_STRATEGIES)
OJS_DEFAULTS: dict[str, Any] = {"keys": ("type",), "on_conflict": "reject"}


#: A document as it was given: its fields in their order and spelling, lists as tuples.
_Document = tuple[tuple[str, Any], ...]


class _FromDocument:
    """Keeps the document that a policy was read from, and whether its states were given. No fields
    of the policy: they are not compared, not shown, and a policy that is made from another one's
    fields has no document."""

    __slots__ = ("_document", "_says_states")

    _document: _Document | None
    _says_states: bool


@dataclass(frozen=True, init=False, slots=True)
class UniquePolicy(_FromDocument):
    """When two calls are the same work, for how long, and what happens to the second.

    The first six fields carry the names of the Open Job Spec; the others are this library's.
    Values are checked and brought into one form, so equal policies compare equal.
    """

    #: The dimensions of the key: ``type`` (always), ``queue``, ``args``, ``meta``.
    keys: tuple[str, ...]
    #: The arguments that count; None for all.
    args_keys: tuple[str, ...] | None
    #: The headers that count, with the dimension ``meta``.
    meta_keys: tuple[str, ...] | None
    #: The window: how long after its creation a task can make a call a duplicate. None: no bound.
    period: timedelta | None
    #: The states in which a task makes a call a duplicate.
    states: tuple[str, ...]
    #: What is done with a duplicate.
    on_conflict: str
    #: Makes the key from the bound arguments, in place of ``args``.
    key: Callable[..., Any] | str | None
    #: How long replacing may push a task back.
    max_wait: timedelta | None
    #: Whether the key comes from the call or from its ``idempotency_key``.
    identity_strategy: str

    def __init__(
        self,
        *,
        keys: Iterable[str] | str = DEFAULTS["keys"],
        args_keys: Iterable[str] | str | None = None,
        meta_keys: Iterable[str] | str | None = None,
        period: float | timedelta | str | None = None,
        states: Iterable[str] | str = DEFAULTS["states"],
        on_conflict: str = "ignore",
        key: Callable[..., Any] | str | None = None,
        max_wait: float | timedelta | str | None = None,
        identity_strategy: str = "strict",
    ) -> None:
        given = locals()
        for field, check in CHECKS.items():
            object.__setattr__(self, field, check(given[field]))
        object.__setattr__(self, "_document", None)
        object.__setattr__(self, "_says_states", states is not DEFAULTS["states"])
        _refuse_clashes(self)
        _warn_of_gaps(self.states)

    @classmethod
    def from_ojs(cls, document: Mapping[str, Any]) -> UniquePolicy:
        """Return the policy of an Open Job Spec document, with that specification's defaults."""
        policy = cls(**ojs_fields(document))
        object.__setattr__(policy, "_document", _kept(document))
        if "keys" not in document:
            warn_of_ignored_arguments(document)
        return policy

    def to_ojs(self) -> dict[str, Any]:
        """Return the Open Job Spec document, or raise InvalidPolicy for what it cannot say.

        That of a policy from `from_ojs` is the document that was given, word for word.
        """
        if self._document is not None:
            return {name: _as_json(value) for name, value in self._document}
        for field in ("key", "max_wait", "identity_strategy"):
            if getattr(self, field) != DEFAULTS[field]:
                raise _not_in_ojs(field, getattr(self, field))
        if self.on_conflict not in OJS_CONFLICT_STRATEGIES:
            raise _not_in_ojs("on_conflict", self.on_conflict)
        document: dict[str, Any] = {"keys": list(self.keys)}
        if self.args_keys is not None:
            document["args_keys"] = list(self.args_keys)
        if self.meta_keys is not None:
            document["meta_keys"] = list(self.meta_keys)
        if self.period is not None:
            document["period"] = to_iso8601(self.period)
        return {**document, "states": list(self.states), "on_conflict": self.on_conflict}

    def as_fields(self) -> dict[str, Any]:
        """Return the fields by name; ``UniquePolicy(**policy.as_fields()) == policy``."""
        return {field: getattr(self, field) for field in CHECKS}

    def __reduce__(self) -> tuple[Any, ...]:
        # The one that dataclasses have knows of fields alone. Nothing is checked, or warned of,
        # again.
        return _restored, (type(self), self.as_fields(), self._document, self._says_states)

    @property
    def says_states(self) -> bool:
        """Whether its states were given, and are not the default."""
        return self._says_states

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The arguments that the policy asks for by name, for a check against a signature."""
        if isinstance(self.key, str):
            return names_in_format(self.key)
        return self.args_keys or ()


assert tuple(field.name for field in fields(UniquePolicy)) == tuple(CHECKS)


def _restored(
    cls: type[UniquePolicy], kept: Mapping[str, Any], document: _Document | None, says_states: bool
) -> UniquePolicy:
    policy = object.__new__(cls)
    ours = (("_document", document), ("_says_states", says_states))
    for name, value in (*kept.items(), *ours):
        object.__setattr__(policy, name, value)
    return policy


def _refuse_clashes(policy: UniquePolicy) -> None:
    if policy.key is not None and policy.args_keys is not None:
        raise _clash(
            "key", "args_keys", "both say which arguments make the key: give only one of them"
        )
    for field in ("args_keys", "key"):
        if getattr(policy, field) is not None and "args" not in policy.keys:
            raise _clash(field, "keys", f"{field} stands for 'args', so add 'args' to keys")
    if policy.meta_keys is not None and "meta" not in policy.keys:
        raise _clash("meta_keys", "keys", "meta_keys has no effect alone, so add 'meta' to keys")
    if "meta" in policy.keys and policy.meta_keys is None:
        raise _clash(
            "meta_keys", "keys", "keys has 'meta', so name the headers that count in meta_keys"
        )
    if policy.max_wait is not None and policy.on_conflict not in REPLACING:
        raise _clash(
            "max_wait",
            "on_conflict",
            f"it bounds replacing, so it wants on_conflict {one_of(REPLACING)} "
            f"and not {policy.on_conflict!r}",
        )


def _clash(field: str, other: str, cure: str) -> InvalidPolicy:
    return InvalidPolicy(f"{label(field)} clashes with {label(other)}: {cure}", field=field)


# -- Open Job Spec ---------------------------------------------------------------------------------


def ojs_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document, with the specification's own defaults for the others."""
    return {**OJS_DEFAULTS, **_checked_ojs(document)}


def _kept(document: Mapping[str, Any]) -> _Document:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in document.items()
    )


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _checked_ojs(document: object) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise InvalidPolicy(
            f"unique: {shown(document)} is not a policy: give True, False, a UniquePolicy, or a "
            "mapping with the fields of an Open Job Spec UniquePolicy",
            field="unique",
        )
    for name in document:
        if name not in OJS_FIELDS:
            raise _unknown_ojs_field(name)
    return {
        field: value
        for field in OJS_FIELDS
        if field in document and (value := _checked_ojs_field(field, document)) is not None
    }


def _checked_ojs_field(field: str, document: Mapping[str, Any]) -> Any:
    value = document[field]
    if field == "on_conflict":
        if isinstance(value, str) and value in _OUR_STRATEGIES:
            raise _ours_alone(field, value)
        return check_choice(field, value, OJS_CONFLICT_STRATEGIES)
    if value is None and field in ("args_keys", "meta_keys", "period"):
        return None  # the specification's own table gives null as their default
    if field == "period":
        return parse_ojs_duration(value)
    if not isinstance(value, (list, tuple)):
        raise InvalidPolicy(
            f"{label(field)}: {shown(value)} is not an array: "
            "the Open Job Spec wants a list of strings",
            field=field,
        )
    # The specification's own example has "meta_keys": [] beside keys without "meta".
    unused = field == "meta_keys" and not value and "meta" not in document.get("keys", ())
    return None if unused else CHECKS[field](value)


def _ours_alone(field: str, value: str) -> InvalidPolicy:
    option = OPTION_OF[field]
    return InvalidPolicy(
        f"{label(field)}: the Open Job Spec has no {value!r}: give {option}={value!r} beside "
        f"unique=. Use {one_of(OJS_CONFLICT_STRATEGIES)} in a document",
        field=field,
    )


def _unknown_ojs_field(name: object) -> InvalidPolicy:
    if name == "unique":
        cure = " Give the object that stands under 'unique', not the one around it"
    elif name in OPTION_OF or name in OPTION_OF.values():
        cure = f" Give {OPTION_OF.get(str(name), name)}= beside unique=, or use UniquePolicy(...)"
    else:
        cure = f"{suggestion(name, OJS_FIELDS)} Use {one_of(OJS_FIELDS)}"
    return InvalidPolicy(
        f"{shown(name)} is not a field of an Open Job Spec UniquePolicy.{cure}",
        field=name if isinstance(name, str) else None,
    )


def _not_in_ojs(field: str, value: object) -> InvalidPolicy:
    return InvalidPolicy(
        f"{label(field)}: the Open Job Spec cannot say {shown(value)}. "
        f"Leave {field} out of a policy that is shared as a document",
        field=field,
    )


# -- Warnings --------------------------------------------------------------------------------------

#: What was warned about in this process. A policy can be built for every call, so it is bounded.
_warned: set[object] = set()
_MOST_WARNINGS = 1000


def _warn_of_gaps(states: tuple[str, ...]) -> None:
    # The named groups have none, and are nearly all there is.
    gaps = "" if states in GROUPS.values() else explain_gaps(states)
    if gaps:
        groups = one_of(GROUPS)
        warn_once(states, f"{gaps}. Add what is left out, or name a group: {groups}")


def warn_of_ignored_arguments(document: Mapping[str, Any], task: str | None = None) -> None:
    """Once for a task: a call may bring a document of its own, with another window each time."""
    whose = f"{task}: " if task else ""
    warn_once(
        repr(document) if task is None else ("keys", task),
        f"{whose}unique={shown(dict(document))} has no 'keys', and the Open Job Spec's default is "
        "['type']: calls with different arguments are duplicates of each other. "
        "Say 'keys': ['type', 'args'] to tell them apart, or 'keys': ['type'] if that is meant",
    )


def warn_of_window_alone(task: str, period: timedelta) -> None:
    """A window whose task did not say what it is for: the name promises more than it does."""
    shown_period = to_iso8601(period)
    warn_once(
        ("window", task),
        f"{task}: unique_for={shown_period} is given without unique_states. The key is then free "
        "as soon as the task ends, and another task is admitted beside one that waits or runs for "
        f"longer than {shown_period}. For at most one task in {shown_period}, also when it has "
        "ended, add unique_states='window'; if the key shall be free at the end, add "
        "unique_states='until_done'",
    )


def warn_of_short_window(task: str, period: timedelta, delay_ms: int) -> None:
    warn_once(
        ("countdown", task),
        f"{task}: unique_for={to_iso8601(period)} is shorter than the countdown (or eta) of the "
        f"call, {delay_ms / 1000:g} s: the window ends before the task starts, and an equal call "
        "is admitted beside it. Give a window that is longer than the countdown, or leave "
        "unique_for out",
    )


def warn_once(subject: object, message: str) -> None:
    if subject in _warned or len(_warned) >= _MOST_WARNINGS:
        return
    _warned.add(subject)
    warn_user(message, UniquePolicyWarning)
