"""Options that several commands share."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import click

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import InvalidPolicy
from celery_unique.locks import key_of_call, key_of_idempotency_key
from celery_unique.operations.select import (
    STATE_NAMES,
    Selection,
    find,
    installed_state,
    is_key,
    states_named,
)
from celery_unique.policy.durations import milliseconds, parse_duration
from celery_unique.stores.memory import MemoryStore

from .output import Screen, printable

#: The program in texts of ``operations``, which do not know how they were called.
GENERIC = "celery -A APP unique"

Function = TypeVar("Function", bound=Callable[..., Any])


# Converters as functions: click's class for them is generic in some of its releases.


_SHORT_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration(value: Any) -> int:
    """Milliseconds from seconds, ISO 8601, or what people write: 10m, 1h30m."""
    if isinstance(value, int):
        return value
    short = _SHORT_DURATION.fullmatch(value.strip().lower())
    if short and any(short.groups()):
        weeks, days, hours, minutes, seconds = (int(number or 0) for number in short.groups())
        return (((weeks * 7 + days) * 24 + hours) * 3600 + minutes * 60 + seconds) * 1000
    if value in ("0", "PT0S"):  # not a duration of a policy, but an age
        return 0
    try:
        number = float(value)
    except ValueError:
        number = value
    try:
        return milliseconds(parse_duration(number, "age"))
    except InvalidPolicy:
        raise click.BadParameter(
            f"{printable(value)} is not a duration: "
            "give 10m, 1h30m, seconds (600) or ISO 8601 (PT10M)."
        ) from None


def json_array(value: Any) -> list[Any]:
    document: list[Any] = _json(value, list, "an array such as '[7, \"full\"]'")
    return document


def json_object(value: Any) -> dict[str, Any]:
    document: dict[str, Any] = _json(value, dict, "an object such as '{\"shop_id\": 7}'")
    return document


def _json(value: Any, kind: type, example: str) -> Any:
    """JSON as in a message: with Celery's forms of dates, UUIDs and the like."""
    from kombu.utils import json

    if isinstance(value, kind):
        return value
    try:
        document: Any = json.loads(value)
    except (ValueError, TypeError, KeyError, RecursionError):
        document = None
    if isinstance(document, kind):
        return document
    raise click.BadParameter(f"{printable(value)} is not JSON of the right kind: write {example}.")


def whole_key(value: Any) -> str:
    if isinstance(value, str) and is_key(value):
        return value
    raise click.BadParameter(
        f"{printable(str(value))} is not a whole key: take it from unique_key of a result, from "
        "list --json or from show."
    )


@dataclass(frozen=True, slots=True)
class LockQuery:
    """What a command needs: the app's state, and the form of its output."""

    app_state: AppState
    screen: Screen
    as_json: bool


def lock_query(ctx: click.Context, as_json: bool) -> LockQuery:
    screen = Screen(colours=not getattr(ctx.obj, "no_color", False))
    app_state = installed_state(ctx.obj.app)
    if isinstance(app_state.store, MemoryStore):
        screen.line(
            "memory:// keeps locks in the process that acquired them: those of other processes are "
            "not visible here.",
            err=True,
        )
    return LockQuery(app_state, screen, as_json)


def program(ctx: click.Context) -> str:
    """How the command was called, for advice that can be copied."""
    root = ctx.find_root()
    if root.command.name == "unique":  # by main(): the program has this group alone
        return root.info_name or GENERIC
    app = root.params.get("app")
    return f"celery -A {shlex.quote(app)} unique" if isinstance(app, str) else GENERIC


json_option = click.option("--json", "as_json", is_flag=True, help="For programs: lines of JSON.")


def _together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


#: Options that name a call, besides its task.
call_options = _together(
    click.option(
        "--args", type=json_array, help="Positional arguments of a call, as a JSON array."
    ),
    click.option(
        "--kwargs", type=json_object, help="Keyword arguments of a call, as a JSON object."
    ),
    click.option("--idempotency-key", help="The idempotency key of a call."),
    click.option(
        "--idempotency-key-stdin",
        is_flag=True,
        help="Read it from the standard input: any text, and not in the shell's history.",
    ),
)

#: WHAT, as an argument or as an option.
what_options = _together(
    click.argument("what", required=False),
    click.option("--task", metavar="NAME", help="The same as WHAT: the name of a task."),
    click.option("--task-id", metavar="ID", help="The same as WHAT: the id of a task."),
    click.option("--key", metavar="KEY", help="The same as WHAT: a key, whole or as in list."),
    call_options,
)

#: Options that select locks.
selection_options = _together(
    click.option("--task", metavar="NAME", help="Of this task, or of those like 'shop.*'."),
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice(STATE_NAMES),
        metavar="STATE",
        help=f"In this state; may be repeated. One of {', '.join(STATE_NAMES)}.",
    ),
    click.option(
        "--older-than",
        type=duration,
        help="Acquired at least this long ago: 10m, 1h30m, seconds, or ISO 8601 such as PT10M.",
    ),
    click.option("--newer-than", type=duration, help="Acquired at most this long ago, as above."),
    click.option("--task-id", metavar="ID", help="Held by this task."),
    click.option("--worker", metavar="NAME", help="Run by this worker, or by those like '*@web1'."),
    click.option("--key", type=whole_key, help="Of this key, which must be given whole."),
    call_options,
)


def what_of(what: str | None, given: dict[str, Any]) -> str | None:
    """WHAT of ``what_options``."""
    named = [each for each in (what, given["task"], given["task_id"], given["key"]) if each]
    if len(named) > 1:
        raise click.UsageError("WHAT, --task, --task-id and --key mean the same: give one of them.")
    return named[0] if named else None


def selection_of(app_state: AppState, given: dict[str, Any]) -> Selection:
    """The selection of ``selection_options``."""
    key, task = given["key"], given["task"]
    args, kwargs = given["args"], given["kwargs"]
    idempotency_key = idempotency_key_of(given)
    by_call = args is not None or kwargs is not None
    if (key is not None) + by_call + (idempotency_key is not None) > 1:
        raise click.UsageError(
            "A key, a call (--args, --kwargs) and an --idempotency-key each name one lock: "
            "give one of them."
        )
    if idempotency_key is not None:
        key, task = key_of_idempotency_key(app_state, task, idempotency_key), None
    elif by_call:
        if task is None:
            raise click.UsageError("--args and --kwargs belong to a call of --task NAME.")
        key, task = key_of_call(app_state, task, args or (), kwargs), None
    return Selection(
        task=task,
        states=states_named(given["states"]),
        older_than_ms=given["older_than"],
        newer_than_ms=given["newer_than"],
        task_id=given["task_id"],
        worker=given["worker"],
        key=key,
    )


def with_what(app_state: AppState, what: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The options of ``selection_options``, with the argument WHAT as one of them."""
    if what is None:
        return given
    option = "task" if what in app_state.app.tasks else "key" if is_key(what) else None
    if option is not None:
        return _with(given, option, what)
    found = list(islice(find(app_state, what), 2))
    if len(found) > 1:
        raise click.UsageError(
            f"{printable(what)} means more than one key: give more of it, or the whole key."
        )
    for key, record, _ in found:
        if what not in record.tasks and what not in record.marks:
            return _with(given, "key", key)
    return _with(given, "task_id", what)


def _with(given: dict[str, Any], option: str, value: str) -> dict[str, Any]:
    if given[option] is not None:
        raise click.UsageError(
            f"{printable(value)} and --{option.replace('_', '-')} mean the same: give one of them."
        )
    return {**given, option: value}


def idempotency_key_of(given: dict[str, Any]) -> str | None:
    """The key that was given as an option or, without the line end, as input."""
    key: str | None = given["idempotency_key"]
    if not given["idempotency_key_stdin"]:
        return key
    if key is not None:
        raise click.UsageError("Give the idempotency key as an option or as input, not both.")
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")
