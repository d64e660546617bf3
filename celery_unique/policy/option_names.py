"""The names of options of tasks and calls, and what a wrong name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_unique.exceptions import InvalidPolicy, nearest, one_of

from .fields import OPTION_OF

__all__ = [
    "CALL_ONLY",
    "LEFT_OVER",
    "OPTION_FIELDS",
    "TASK_OPTIONS",
    "check_call_names",
    "check_decorator_names",
    "check_names",
    "is_near_miss",
    "may_be_an_option",
]

#: Options of other libraries, and the line of docs/howto/migrate.md that says what they become.
LEFT_OVER = {
    "once": (
        "celery-once",
        (
            "once={'keys': ['a']} becomes unique_on=['a'], once={'unlock_before_run': True} "
            "becomes unique_states='until_start', once={'graceful': True} is the default, and "
            "without it write unique_on_conflict='reject'"
        ),
    ),
    "lock_expiry": (
        "celery-singleton",
        "leave it out, or write unique_for=N if it is a promise to run at most once in that time",
    ),
    "raise_on_duplicate": ("celery-singleton", "write unique_on_conflict='reject'"),
    "heimdall": (
        "celery-heimdall",
        "heimdall={'unique': True} becomes unique=True, and 'key' becomes unique_key",
    ),
}

OPTION_FIELDS = {option: field for field, option in OPTION_OF.items()}
#: What a task, an annotation or a call may say.
TASK_OPTIONS = frozenset({"unique", *OPTION_FIELDS})
#: What only a call may say.
CALL_ONLY = frozenset({"idempotency_key", "idempotency_ttl"})
_ALL = (*sorted(TASK_OPTIONS | CALL_ONLY),)

_OUR_PREFIXES = ("unique_", "idempotency_")
#: Wider for calls: Celery puts any option it does not know into the message's properties.
_CALL_PREFIXES = ("uniq", "idempot", "identity_s")
#: How a name begins that may be one of ours with a slip in it.
_MISSPELLED_PREFIXES = ("un", "ui", "id")
_SLIPS = 2

#: What people write who know the thing by another name: no spelling is near enough.
_OTHER_WORDS = {
    "unique_on": ("arg", "args", "arguments", "kwargs", "on_args", "params"),
    "unique_for": ("window", "ttl", "timeout", "expires", "expiry", "expire", "duration", "lease"),
    "unique_meta": ("header", "headers", "stamps"),
    "unique_by": ("dimensions", "queue", "type"),
    "unique_on_conflict": ("conflict", "duplicate", "on_duplicate"),
    "unique_max_wait": ("wait", "max_delay"),
    "unique_states": ("until",),
    "identity_strategy": ("identity",),
}
_OTHER_WORDS_OF_A_KEY = {
    "idempotency_ttl": ("expires", "expiry", "expire", "timeout", "for", "window", "period"),
    "idempotency_key": ("id", "token"),
}
_MEANT = {
    **{word: (option,) for option, words in _OTHER_WORDS.items() for word in words},
    "strategy": ("unique_on_conflict", "identity_strategy"),
}
_MEANT_OF_A_KEY = {
    word: (option,) for option, words in _OTHER_WORDS_OF_A_KEY.items() for word in words
}


def may_be_an_option(name: str) -> bool:
    """Whether an option of a call is one of ours, right or wrong."""
    return name.startswith(_CALL_PREFIXES)


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse a name that looks like an option of this library and is none.

    `where` is ``"call"``, or where else the options were found, for the message.
    """
    for name in names:
        if name in TASK_OPTIONS or (name in CALL_ONLY and where == "call"):
            continue
        if name in CALL_ONLY:
            raise InvalidPolicy(
                f"{name} was given in the {where}, where it would be the same for every call: "
                f"{_to_a_call(name)}",
                field=name,
            )
        if name.startswith(_CALL_PREFIXES if where == "call" else _OUR_PREFIXES):
            raise _unknown(name, where)


def check_call_names(names: Iterable[str]) -> None:
    """As `check_names`; and a near miss, which Celery would put into the message's properties."""
    for name in names:
        check_names([name], "call")
        if is_near_miss(name):
            raise _unknown(name, "call")


def check_decorator_names(names: Iterable[str], where: str) -> None:
    """As `check_names`; and a near miss, which as an attribute of a class would be its own."""
    for name in names:
        check_names([name], where)
        if is_near_miss(name):
            raise _unknown(name, where)


def is_near_miss(name: str) -> bool:
    """Whether a name that is none of our options is one with a slip or two in it."""
    lower = name.lower()
    if name in _ALL or not lower.startswith(_MISSPELLED_PREFIXES):
        return False
    return any(_slips(lower, option) <= _SLIPS for option in _ALL)


def _slips(wrong: str, right: str) -> int:
    """How many letters are lost, added, wrong, or swapped with the next."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(wrong, 1):
        before, above, row = row, before, [i]
        for j, wanted in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == right[j - 2] and wrong[i - 2] == wanted:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _unknown(name: str, where: str) -> InvalidPolicy:
    known = _ALL if where == "call" else sorted(TASK_OPTIONS)
    return InvalidPolicy(
        f"{name} ({where}) is not an option.{_suggestion(name, where)} Use {one_of(known)}",
        field=name,
    )


def _suggestion(name: str, where: str) -> str:
    meant = _meant(name.lower())
    if not meant:
        return ""
    if where == "call" or not CALL_ONLY.intersection(meant):
        return f" Did you mean {one_of(meant)}?"
    return f" Did you mean {one_of(meant)}? It is for one call: {_to_a_call(meant[0])}."


def _to_a_call(name: str) -> str:
    return f"give it to the call, apply_async(..., {name}=...)"


def _meant(name: str) -> Sequence[str]:
    """Return the options that the name may have been meant to be, mostly one."""
    head, _, bare = name.partition("_")
    bare = bare.removeprefix("default_")  # the name of a setting
    if head == "unique" and bare in OPTION_OF:  # a policy's field: unique_period is unique_for
        return (OPTION_OF[bare],)
    if head == "unique" and f"unique_{bare}" in TASK_OPTIONS:
        return (f"unique_{bare}",)
    other = (_MEANT_OF_A_KEY if head.startswith("idempot") else _MEANT).get(bare)
    if other:
        return other
    near = _begun(name) or nearest(name, _ALL)
    return (near,) if near else ()


def _begun(name: str) -> str | None:
    """Return the option that the name is the beginning of, if that is one, or one of the others."""
    begun = sorted((option for option in _ALL if option.startswith(name)), key=len)
    return begun[0] if begun and all(each.startswith(begun[0]) for each in begun) else None
