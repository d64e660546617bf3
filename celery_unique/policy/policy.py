"""``UniquePolicy``: what makes a call a duplicate, and what happens to it; and its warnings."""

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
    warn_user,
)

from . import ojs
from .durations import to_iso8601
from .fields import (
    CHECKS,
    DEFAULTS,
    POSTPONING,
    Dimension,
    IdentityStrategy,
    OnConflict,
    label,
    names_in_format,
)
from .states import GROUPS, LIVE, StateGroup, StateName, explain_gaps

__all__ = [
    "UniquePolicy",
    "UniquePolicyWarning",
    "warn_of_ignored_arguments",
    "warn_of_short_window",
    "warn_of_window_alone",
    "warn_once",
]


class _FromDocument:
    """Slots for the document that a policy was read from, whether its states were given, and what
    calls derive from it once. Not fields of the policy: they are neither compared nor shown, and a
    policy that is made from another one's fields has no document."""

    __slots__ = ("_document", "_says_states", "terms")

    _document: ojs.Document | None
    _says_states: bool
    #: Set by ``publish.request.terms_of``.
    terms: Any


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
    #: What happens to a duplicate.
    on_conflict: OnConflict
    #: Makes the key from the bound arguments, instead of ``args``.
    key: Callable[..., Any] | str | None
    #: How long replacing may push a task back.
    max_wait: timedelta | None
    #: Whether the key comes from the call or from its ``idempotency_key``.
    identity_strategy: IdentityStrategy
    #: Makes a short text of the arguments, for operators: it is no part of the key.
    label: str | None
    #: How many tasks of one key may be counted at a time before a call conflicts.
    limit: int
    #: How many calls may be parked, with ``queue``; None: any number.
    max_queue: int | None
    #: Makes the key, in place of type and arguments: several tasks share one lane.
    group: str | None
    #: The parameters whose lists are merged, with ``on_conflict="merge"``. Not part of the key.
    merge: tuple[str, ...] | None
    #: How long the values of all calls that one run gets may be, as JSON.
    merge_max_bytes: int

    def __init__(
        self,
        *,
        keys: Iterable[Dimension] | Dimension = DEFAULTS["keys"],
        args_keys: Iterable[str] | str | None = None,
        meta_keys: Iterable[str] | str | None = None,
        period: float | timedelta | str | None = None,
        states: Iterable[StateName] | StateGroup = DEFAULTS["states"],
        on_conflict: OnConflict = "ignore",
        key: Callable[..., Any] | str | None = None,
        max_wait: float | timedelta | str | None = None,
        identity_strategy: IdentityStrategy = "strict",
        label: str | None = None,
        limit: int = 1,
        max_queue: int | None = None,
        group: str | None = None,
        merge: Iterable[str] | str | None = None,
        merge_max_bytes: int = DEFAULTS["merge_max_bytes"],
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
        policy = cls(**ojs.fields_of(document))
        object.__setattr__(policy, "_document", ojs.frozen(document))
        if "keys" not in document:
            warn_of_ignored_arguments(document)
        return policy

    def to_ojs(self) -> dict[str, Any]:
        """Return the Open Job Spec document, or raise InvalidPolicy for what it cannot express.

        That of a policy from `from_ojs` is the document that was given, word for word.
        """
        return ojs.document_of(self.as_fields(), self._document)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields by name; ``UniquePolicy(**policy.as_fields()) == policy``."""
        return {field: getattr(self, field) for field in CHECKS}

    def __reduce__(self) -> tuple[Any, ...]:
        # The default of dataclasses covers fields alone. Nothing is checked, or warned of, again.
        return _restored, (type(self), self.as_fields(), self._document, self._says_states)

    @property
    def says_states(self) -> bool:
        """Whether its states were given, and are not the default."""
        return self._says_states

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The arguments that the policy names, for a check against a signature."""
        names = self._names_in_key
        return (*names, *names_in_format(self.label, "label")) if self.label else names

    @property
    def _names_in_key(self) -> tuple[str, ...]:
        if self.group is not None:
            return names_in_format(self.group, "group")
        if isinstance(self.key, str):
            return names_in_format(self.key)
        return self.args_keys or ()


assert tuple(field.name for field in fields(UniquePolicy)) == tuple(CHECKS)


def _restored(
    cls: type[UniquePolicy],
    kept: Mapping[str, Any],
    document: ojs.Document | None,
    says_states: bool,
) -> UniquePolicy:
    policy = object.__new__(cls)
    ours = (("_document", document), ("_says_states", says_states))
    for name, value in (*kept.items(), *ours):
        object.__setattr__(policy, name, value)
    return policy


def _refuse_clashes(policy: UniquePolicy) -> None:
    if policy.key is not None and policy.args_keys is not None:
        raise _clash(
            "key", "args_keys", "both name the arguments of the key: give only one of them"
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
    if policy.max_wait is not None and policy.on_conflict not in POSTPONING:
        raise _clash(
            "max_wait",
            "on_conflict",
            f"it bounds how long calls postpone a task, so give on_conflict {one_of(POSTPONING)} "
            f"and not {policy.on_conflict!r}",
        )
    if policy.max_queue is not None and policy.on_conflict != "queue":
        raise _clash(
            "max_queue",
            "on_conflict",
            "it bounds how many calls are parked, so give on_conflict 'queue' "
            f"and not {policy.on_conflict!r}",
        )
    if policy.group is not None:
        _refuse_beside_group(policy)
    _refuse_merge_clashes(policy)


def _refuse_merge_clashes(policy: UniquePolicy) -> None:
    if policy.on_conflict != "merge":
        for field in ("merge", "merge_max_bytes"):
            if getattr(policy, field) != DEFAULTS[field]:
                raise _clash(
                    field,
                    "on_conflict",
                    "it is for calls that are merged, so give on_conflict 'merge' and not "
                    f"{policy.on_conflict!r}",
                )
        return
    if policy.merge is None:
        raise _clash(
            "merge",
            "on_conflict",
            "on_conflict 'merge' needs the names of the list parameters that it merges: add "
            "unique_merge='doc_ids', for example",
        )
    in_key = [name for name in policy.merge if name in policy._names_in_key]
    if in_key:
        field = "group" if policy.group else "args_keys" if policy.key is None else "key"
        raise _clash(
            "merge",
            field,
            f"{in_key[0]!r} is merged, so that calls which differ in it have one key: take it out "
            "of one of them",
        )
    ended = [state for state in policy.states if state not in LIVE]
    if ended:
        raise _clash(
            "on_conflict",
            "states",
            f"a task that is {ended[0]} runs no more, and would swallow the values of a call: take "
            f"{one_of(ended)} out of the states. To collect calls for some time, call with "
            "countdown=",
        )


def _refuse_beside_group(policy: UniquePolicy) -> None:
    for field in ("args_keys", "key"):
        if getattr(policy, field) is not None:
            raise _clash("group", field, "the group is the key: put what counts into its text")
    if {*policy.keys} - {"meta"} != {"type", "args"}:
        raise _clash("group", "keys", "the group is the key: give no dimensions")


def _clash(field: str, other: str, cure: str) -> InvalidPolicy:
    return InvalidPolicy(f"{label(field)} clashes with {label(other)}: {cure}", field=field)


# -- Warnings --------------------------------------------------------------------------------------

#: Subjects of earlier warnings of this process. Bounded: a policy can be built for every call.
_warned: set[object] = set()
_MOST_WARNINGS = 1000


def _warn_of_gaps(states: tuple[str, ...]) -> None:
    # The named groups, which most policies use, have none.
    gaps = "" if states in GROUPS.values() else explain_gaps(states)
    if gaps:
        groups = one_of(GROUPS)
        warn_once(states, f"{gaps}. Add what is left out, or name a group: {groups}")


def warn_of_ignored_arguments(document: Mapping[str, Any], task: str | None = None) -> None:
    """Warn once for each task: a call may have a document of its own, with another window."""
    whose = f"{task}: " if task else ""
    warn_once(
        repr(document) if task is None else ("keys", task),
        f"{whose}unique={shown(dict(document))} has no 'keys', and the Open Job Spec's default is "
        "['type']: calls with different arguments are duplicates of each other. "
        "Add 'keys': ['type', 'args'] to distinguish them, or 'keys': ['type'] if that is meant",
    )


def warn_of_window_alone(task: str, period: timedelta) -> None:
    """Warn of ``unique_for`` without states, which promises more than it does."""
    shown_period = to_iso8601(period)
    warn_once(
        ("window", task),
        f"{task}: unique_for={shown_period} is given without unique_states. The key is then free "
        "as soon as the task finishes, and another task is admitted beside one that waits or runs "
        f"for longer than {shown_period}. For at most one task in {shown_period}, also when it has "
        "finished, add unique_states='window'; if the key shall be free at the end, add "
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
