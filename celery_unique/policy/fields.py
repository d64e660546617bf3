"""The checks of the fields of a policy: each returns the form that the policy keeps.

Every check is idempotent, so a value that a policy keeps passes again unchanged.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, get_args

from celery_unique.exceptions import InvalidPolicy, nearest, one_of, shown, suggestion

from .durations import parse_duration
from .states import GROUPS, LIVE, STATES

__all__ = ["CHECKS", "DEFAULTS", "DIMENSIONS", "OPTION_OF", "label", "names_in_format"]

# What type checkers of users see, and what is checked at run time.
Dimension = Literal["type", "queue", "args", "meta"]
OnConflict = Literal[
    "ignore", "reject", "replace", "replace_except_schedule", "rerun", "queue", "merge"
]
IdentityStrategy = Literal["strict", "caller_provided", "always_unique"]

DIMENSIONS: tuple[str, ...] = get_args(Dimension)
CONFLICT_STRATEGIES: tuple[str, ...] = get_args(OnConflict)
REPLACING = ("replace", "replace_except_schedule")
#: Those under which a call may postpone a task.
POSTPONING = (*REPLACING, "merge")
#: Fields that bound what some strategies do, and those strategies.
BOUNDS = {"max_wait": POSTPONING, "max_queue": ("queue",), "merge_max_bytes": ("merge",)}
IDENTITY_STRATEGIES: tuple[str, ...] = get_args(IdentityStrategy)

#: The option of a task or a call that sets each field.
OPTION_OF = {
    "keys": "unique_by",
    "args_keys": "unique_on",
    "meta_keys": "unique_meta",
    "period": "unique_for",
    "states": "unique_states",
    "on_conflict": "unique_on_conflict",
    "key": "unique_key",
    "max_wait": "unique_max_wait",
    "identity_strategy": "identity_strategy",
    "label": "unique_label",
    "limit": "unique_limit",
    "max_queue": "unique_max_queue",
    "group": "unique_group",
    "merge": "unique_merge",
    "merge_max_bytes": "unique_merge_max_bytes",
}

#: What ``unique=True`` means, in the form a policy keeps it.
DEFAULTS: dict[str, Any] = {
    "keys": ("type", "args"),
    "args_keys": None,
    "meta_keys": None,
    "period": None,
    "states": LIVE,
    "on_conflict": "ignore",
    "key": None,
    "max_wait": None,
    "identity_strategy": "strict",
    "label": None,
    "limit": 1,
    "max_queue": None,
    "group": None,
    "merge": None,
    "merge_max_bytes": 1_000_000,
}


def label(field: str) -> str:
    """The name of a field in an error, for users of policies and of options."""
    option = OPTION_OF[field]
    return field if option == field else f"{field} ({option})"


def check_names(field: str, value: object) -> tuple[str, ...]:
    """Return names as a tuple; a string is one name. Empty and repeated ones are refused."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidPolicy(
            f"{label(field)}: {shown(value)} is not a list of names: "
            "give a list of strings, or one string for one name",
            field=field,
        )
    for name in value:
        if not isinstance(name, str) or not name:
            raise InvalidPolicy(
                f"{label(field)}: {shown(name)} is not a name: every item is a string that is "
                "not empty",
                field=field,
            )
    _refuse_repeated(field, value)
    # The order of a set differs from process to process.
    return tuple(sorted(value) if isinstance(value, (set, frozenset)) else value)


def _refuse_repeated(field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidPolicy(
                f"{label(field)}: {name!r} is repeated: give every name once", field=field
            )
        seen.add(name)


def check_keys(value: object) -> tuple[str, ...]:
    """Return the dimensions in their fixed order. The type is always one of them."""
    names = check_names("keys", value)
    for name in names:
        check_choice("keys", name, DIMENSIONS)
    return tuple(name for name in DIMENSIONS if name in names or name == "type")


def check_args_keys(value: object) -> tuple[str, ...] | None:
    return _some_names(
        "args_keys",
        value,
        "for all arguments. For one key whatever the arguments are, give unique_by='type' in its "
        "place (keys=['type'] in a policy)",
    )


def check_meta_keys(value: object) -> tuple[str, ...] | None:
    return _some_names("meta_keys", value, "if no header belongs to the key")


def _some_names(field: str, value: object, when_to_leave_out: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = check_names(field, value)
    if not names:
        raise InvalidPolicy(
            f"{label(field)}: it is empty. Give at least one name, or leave it out "
            f"{when_to_leave_out}",
            field=field,
        )
    return names


def check_merge(value: object) -> tuple[str, ...] | None:
    return _some_names("merge", value, "with any other strategy than 'merge'")


def check_merge_max_bytes(value: object) -> int:
    if type(value) is not int or value < 1:
        raise InvalidPolicy(
            f"{label('merge_max_bytes')}: {shown(value)} is not a length: give a whole number of "
            "bytes, 1 or more, for the values of all calls that one run gets",
            field="merge_max_bytes",
        )
    return value


def check_period(value: object) -> timedelta | None:
    return None if value is None else parse_duration(value, "period", label("period"))


def check_max_wait(value: object) -> timedelta | None:
    return None if value is None else parse_duration(value, "max_wait", label("max_wait"))


def check_states(value: object) -> tuple[str, ...]:
    """Return the states in the order of a task's life; a string names a group of them."""
    if isinstance(value, str):
        return _states_of_group(value)
    names = check_names("states", value)
    if not names:
        raise InvalidPolicy(
            f"{label('states')}: it is empty, so no call would ever be a duplicate. "
            "Give at least one state, or unique=False",
            field="states",
        )
    for name in names:
        check_choice("states", name, STATES)
    return tuple(state for state in STATES if state in names)


def _states_of_group(name: str) -> tuple[str, ...]:
    if name in STATES:
        raise InvalidPolicy(
            f"{label('states')}: {name!r} is one state and not a group: write [{name!r}]",
            field="states",
        )
    near = None if name in GROUPS else nearest(name, (*GROUPS, *STATES))
    if near in STATES:
        raise InvalidPolicy(
            f"{label('states')}: {shown(name)} is not known. Did you mean the state {near!r}? "
            f"A string names a group: write [{near!r}], or use {one_of(GROUPS)}",
            field="states",
        )
    check_choice("states", name, GROUPS)
    return GROUPS[name]


def check_on_conflict(value: object) -> str:
    return check_choice("on_conflict", value, CONFLICT_STRATEGIES)


def check_identity_strategy(value: object) -> str:
    return check_choice("identity_strategy", value, IDENTITY_STRATEGIES)


def check_limit(value: object) -> int:
    return _check_number("limit", value, "tasks of one key, 1 for one at a time")


def check_max_queue(value: object) -> int | None:
    return None if value is None else _check_number("max_queue", value, "calls that may be parked")


def _check_number(field: str, value: object, of_what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise InvalidPolicy(
        f"{label(field)}: {shown(value)} is not a number of {of_what}: "
        "give an integer of 1 or more",
        field=field,
    )


def check_group(value: object) -> str | None:
    """Return a name, or a format string over the arguments."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidPolicy(
            f"{label('group')}: {shown(value)} names no group: give a name, such as 'imports', or "
            "a format string over the arguments, such as 'user:{user_id}'",
            field="group",
        )
    names_in_format(value, "group")
    return value


def check_choice(field: str, value: object, choices: Iterable[str]) -> str:
    # The type first: a list cannot be looked up in a dict.
    if isinstance(value, str) and value in choices:
        return value
    raise InvalidPolicy(
        f"{label(field)}: {shown(value)} is not known."
        f"{suggestion(value, choices)} Use {one_of(choices)}",
        field=field,
    )


def check_key(value: object) -> Callable[..., Any] | str | None:
    """Return a callable as it is, and a format string if it can make a key."""
    if value is None or callable(value):
        return value
    if not isinstance(value, str):
        raise InvalidPolicy(
            f"{label('key')}: {shown(value)} cannot make a key: give a callable that is passed "
            "the bound arguments, or a format string such as '{shop_id}'",
            field="key",
        )
    if not names_in_format(value):
        raise InvalidPolicy(
            f"{label('key')}: {shown(value)} names no argument, so every call would have the same "
            "key: put an argument's name in braces, as in '{shop_id}', or use unique_by='type' "
            "if one key for the task is meant",
            field="key",
        )
    return value


def check_label(value: object) -> str | None:
    """Return a format string that makes a short text for operators."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidPolicy(
            f"{label('label')}: {shown(value)} is no text for operators: give a format string such "
            "as '{shop_id}'",
            field="label",
        )
    names_in_format(value, "label")
    return value


def names_in_format(template: str, field: str = "key") -> tuple[str, ...]:
    """Return the names of the arguments in a format string, that of this field."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _wrong_format(
            field,
            template,
            f"is not a format string ({error}): write '{{shop_id}}', and double a brace that is "
            "meant as text",
        ) from None
    names: dict[str, None] = {}
    for _, name, spec, conversion in parts:
        if name is not None:
            _check_format_field(field, template, name, spec or "", conversion)
            names[name] = None
    return tuple(names)


def _check_format_field(
    field: str, template: str, name: str, spec: str, conversion: str | None
) -> None:
    """Only names: no field reaches into an argument, or takes its format from another."""
    if "{" in spec or "." in name or "[" in name:
        wrong = _braced(name, f":{spec}" if spec else "")
        raise _wrong_format(
            field,
            template,
            f"may hold only names of arguments, such as '{{shop_id}}', and not {wrong}: for "
            "anything else give a callable that returns the string",
        )
    if not name.isidentifier():
        raise _wrong_format(
            field,
            template,
            f"has {_braced(name)}, which is not an argument's name: write every argument by name, "
            "as in '{shop_id}'",
        )
    if conversion not in (None, "r", "s", "a"):
        raise _wrong_format(
            field,
            template,
            f"has {_braced(name, f'!{conversion}')}: write '!r', '!s' or '!a', or nothing",
        )


def _braced(name: str, more: str = "") -> str:
    return shown(f"{{{name}{more}}}")


def _wrong_format(field: str, template: str, wrong: str) -> InvalidPolicy:
    return InvalidPolicy(f"{label(field)}: {shown(template)} {wrong}", field=field)


CHECKS: dict[str, Callable[[object], Any]] = {
    "keys": check_keys,
    "args_keys": check_args_keys,
    "meta_keys": check_meta_keys,
    "period": check_period,
    "states": check_states,
    "on_conflict": check_on_conflict,
    "key": check_key,
    "max_wait": check_max_wait,
    "identity_strategy": check_identity_strategy,
    "label": check_label,
    "limit": check_limit,
    "max_queue": check_max_queue,
    "group": check_group,
    "merge": check_merge,
    "merge_max_bytes": check_merge_max_bytes,
}
