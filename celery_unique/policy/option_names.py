"""The names of options of tasks and calls, and suggestions for wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_unique.exceptions import InvalidPolicy, nearest, one_of

from .fields import OPTION_OF

__all__ = [
    "CALL_ONLY",
    "IDEMPOTENCY_SCOPES",
    "LEFT_OVER",
    "OPTION_FIELDS",
    "TASK_ONLY",
    "TASK_OPTIONS",
    "check_names",
    "check_near_names",
    "is_near_miss",
    "may_be_an_option",
]

#: Options of other libraries, with the cure, as in docs/howto/migrate.md.
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
#: For a task, an annotation or a call.
TASK_OPTIONS = frozenset({"unique", *OPTION_FIELDS})
#: For a call alone.
CALL_ONLY = frozenset({"idempotency_key", "idempotency_scope", "idempotency_ttl"})
#: To whom an idempotency key belongs: its task, the app, or one run of the task that calls.
IDEMPOTENCY_SCOPES = ("task", "app", "run")
#: For a task or an annotation: the worker reads it, not the caller.
TASK_ONLY = frozenset({"unique_guard"})
_ALL = (*sorted(TASK_OPTIONS | CALL_ONLY | TASK_ONLY),)

_OUR_PREFIXES = ("unique_", "idempotency_")
#: Wider for calls: Celery puts any option it does not know into the message's properties.
_CALL_PREFIXES = ("uniq", "idempot", "identity_s")
#: The beginnings of a misspelled option.
_MISSPELLED_PREFIXES = ("un", "ui", "id")

#: Words of other libraries, which no spelling is near enough to.
_OTHER_WORDS = {
    "unique_on": "arg args arguments kwargs on_args params",
    "unique_for": "window ttl timeout expires expiry expire duration lease",
    "unique_meta": "header headers stamps",
    "unique_by": "dimensions queue type",
    "unique_on_conflict": "duplicate on_duplicate strategy",
    "unique_max_wait": "wait max_delay",
    "unique_limit": "concurrency max_concurrency at_once",
    "unique_max_queue": "max_parked queue_size max_size",
    "unique_group": "lane concurrency_key",
    "unique_states": "until",
    "unique_merge": "collect append merged merge_on",
    "unique_merge_max_bytes": "max_bytes max_size merge_max merge_bytes",
    "identity_strategy": "identity strategy",
}
_OTHER_WORDS_OF_A_KEY = {
    "idempotency_ttl": "expires expiry expire timeout for window period",
    "idempotency_key": "id token",
}


def may_be_an_option(name: str) -> bool:
    """Whether an option of a call is one of ours, right or wrong."""
    return name.startswith(_CALL_PREFIXES)


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse a name that looks like an option of this library and is none.

    `where` is ``"call"``, or the place of the options, for the message.
    """
    for name in names:
        if name in TASK_OPTIONS or name in (CALL_ONLY if where == "call" else TASK_ONLY):
            continue
        if name in TASK_ONLY:
            raise InvalidPolicy(
                f"{name} was given to the call, and only the worker reads it: give it to the task, "
                f"@app.task({name}=True), or set {name} for the app",
                field=name,
            )
        if name in CALL_ONLY:
            raise InvalidPolicy(
                f"{name} was given in the {where}, where it would be the same for every call: "
                f"{_to_a_call(name)}",
                field=name,
            )
        if name.startswith(_CALL_PREFIXES if where == "call" else _OUR_PREFIXES):
            raise _unknown(name, where)


def check_near_names(names: Iterable[str], where: str) -> None:
    """As `check_names`, and refuse a misspelled option: in a decorator it would be an attribute of
    the task, in a call a property of the message."""
    for name in names:
        check_names([name], where)
        if is_near_miss(name):
            raise _unknown(name, where)


def is_near_miss(name: str) -> bool:
    """Whether the name is a misspelled option."""
    lower = name.lower()
    if name in _ALL or not lower.startswith(_MISSPELLED_PREFIXES):
        return False
    import difflib  # only odd names need it

    alike = [option for option in _ALL if abs(len(option) - len(name)) <= 2]
    return bool(difflib.get_close_matches(lower, alike, n=1, cutoff=0.8))


def _unknown(name: str, where: str) -> InvalidPolicy:
    known = sorted(TASK_OPTIONS | (CALL_ONLY if where == "call" else TASK_ONLY))
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
    """Return the options that the name may stand for, mostly one."""
    head, _, bare = name.partition("_")
    bare = bare.removeprefix("default_")  # the name of a setting
    if head == "unique" and bare in OPTION_OF:  # a policy's field: unique_period is unique_for
        return (OPTION_OF[bare],)
    if head == "unique" and f"unique_{bare}" in TASK_OPTIONS:
        return (f"unique_{bare}",)
    words = _OTHER_WORDS_OF_A_KEY if head.startswith("idempot") else _OTHER_WORDS
    if other := [option for option, of_it in words.items() if bare in of_it.split()]:
        return other
    near = _completed(name) or nearest(name, _ALL)
    return (near,) if near else ()


def _completed(name: str) -> str | None:
    """Return the shortest option that begins with the name, if all others begin with it, too."""
    begun = sorted((option for option in _ALL if option.startswith(name)), key=len)
    return begun[0] if begun and all(each.startswith(begun[0]) for each in begun) else None
