"""``celery unique show`` and ``celery unique why``"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

import click

from celery_unique.messages import nearest
from celery_unique.operations.explaining import (
    Explanation,
    explain_call,
    explain_idempotency_key,
    explain_record,
    freed_by,
    mark_meaning,
    meaning,
    running_processes,
)
from celery_unique.operations.selecting import HeldLock, find
from celery_unique.runtime import Runtime
from celery_unique.timing import moment_of

from . import FOUND_NOTHING
from .options import (
    Asked,
    asked,
    idempotency_key_of,
    json_option,
    program,
    what_of,
    what_options,
)
from .screen import Command, Screen, age, moment, printable

#: A shortened key of few digits may mean many.
MOST = 20


@click.command("show", short_help="Show everything recorded under a key.")
@what_options
@json_option
@click.pass_context
def show_command(ctx: click.Context, /, what: str | None, as_json: bool, **given: Any) -> None:
    """Show everything that is recorded under a key.

    WHAT is a key, whole or as list shows it, the id of a task, or the name of a task with the
    arguments of a call. Exits with 1 if nothing is recorded.

    \b
    celery -A shop unique show 1:3f6c2a9d01be
    celery -A shop unique show 7c9e6679-7425-40de-944b-e07fc1f90ae7
    celery -A shop unique show shop.rebuild_index --args '[7]'
    """
    command = asked(ctx, as_json)
    what = what_of(what, given)
    found = False
    for explanation in _explanations(command.runtime, what, given):
        if not (explanation.locks or explanation.marks or explanation.more_marks):
            continue
        found = True
        if as_json:
            command.screen.json(_document(explanation))
        else:
            _show(command.screen, explanation)
    _exit(ctx, command, found, what)


@click.command("why", short_help="Explain why a call was dropped.")
@what_options
@json_option
@click.pass_context
def why_command(ctx: click.Context, /, what: str | None, as_json: bool, **given: Any) -> None:
    """Explain why a call was dropped: its key, who holds it, and what would free it.

    WHAT is the name of a task, with the arguments of a call or its idempotency key; or a key,
    whole or as list shows it; or the id of a task. For a call this tells what would become of
    it now, and the text that its key is the digest of: two calls are the same work if and only
    if that text is the same. Exits with 1 if nothing holds the key.

    \b
    celery -A shop unique why shop.rebuild_index --args '[7]'
    celery -A shop unique why shop.pay --idempotency-key order-7
    celery -A shop unique why 1:3f6c2a9d01be
    """
    command = asked(ctx, as_json)
    what = what_of(what, given)
    found = held = False
    for explanation in _explanations(command.runtime, what, given):
        found = True
        held |= any(lock.state != "released" for lock in explanation.locks)
        processes = running_processes(command.runtime, explanation.locks)
        if as_json:
            command.screen.json(_document(explanation, processes))
        else:
            _explain(command.screen, explanation, program(ctx), processes)
    if found and not held:
        ctx.exit(FOUND_NOTHING)
    _exit(ctx, command, found, what)


def _exit(ctx: click.Context, command: Asked, found: bool, what: str | None) -> None:
    if found:
        return
    near = nearest(what, command.runtime.app.tasks)
    hint = f" Did you mean the task {printable(near)}?" if near and near != what else ""
    command.screen.line(f"Nothing is recorded of {printable(what or 'it')}.{hint}", err=True)
    ctx.exit(FOUND_NOTHING)


def _explanations(
    runtime: Runtime, what: str | None, given: dict[str, Any]
) -> Iterator[Explanation]:
    args, kwargs = given["args"], given["kwargs"]
    idempotency_key = idempotency_key_of(given)
    if idempotency_key is not None:
        yield explain_idempotency_key(runtime, what, idempotency_key, args, kwargs)
    elif what is None:
        raise click.UsageError("Name a key, a task's id, or a task and the arguments of a call.")
    elif what in runtime.app.tasks or args is not None or kwargs is not None:
        yield explain_call(runtime, what, args, kwargs)
    else:
        for key, record, now in islice(find(runtime, what), MOST):
            yield explain_record(key, record, now)


# -- for people --------------------------------------------------------------------------


def _explain(
    screen: Screen, explanation: Explanation, called: str, processes: Mapping[str, int]
) -> None:
    made_from = explanation.made_from
    screen.facts(
        [
            ("key", explanation.key),
            ("made from", printable(made_from) if made_from else "(a digest does not tell)"),
            ("on conflict", str(explanation.policy.get("on_conflict", ""))),
            ("in states", " ".join(explanation.policy.get("states", ()))),
        ],
        indent="",
    )
    verdict = explanation.verdict
    if verdict is not None:
        by = f" ({printable(verdict.task_id)})" if verdict.task_id else ""
        kind = "ok" if verdict.outcome in ("created", "replaced", "rerun") else "warning"
        screen.line()
        screen.words(f"A call now {verdict.text}{by}.", kind=kind, bold=True)
    elif not explanation.locks:
        screen.line()
        screen.line(screen.styled("The key is free.", "ok", bold=True))
    for lock in explanation.locks:
        _explain_lock(screen, lock, called, processes.get(lock.task_id))
    _show_marks(screen, explanation)


def _explain_lock(screen: Screen, lock: HeldLock, called: str, process: int | None) -> None:
    entry, now = lock.entry, lock.now
    screen.line()
    screen.line(screen.styled(f"Task {printable(lock.task_id)}", lock.state, bold=True))
    last = f", the last {age(now - entry.last_duplicate_at)} ago" if entry.duplicates else ""
    calls = "call" if entry.duplicates == 1 else "calls"
    ways = freed_by(lock)
    screen.facts(
        [
            ("task", printable(entry.task_name)),
            ("state", f"{lock.state}: {meaning(lock)}"),
            ("called", f"{age(lock.age_ms)} ago, at {_when(entry.created_at)}"),
            ("ETA", _ahead(entry.eta, now)),
            ("run by", _runner(lock, process)),
            ("absorbed", f"{entry.duplicates} {calls}{last}"),
            ("lease ends", _ahead(entry.lease, now)),
            ("freed by", f"{ways[0]}"),
            *(("or by", way) for way in ways[1:]),
            ("by hand", _by_hand(lock, called)),
        ]
    )


def _by_hand(lock: HeldLock, called: str) -> str:
    """The command, which does not stop the task: the way for one that is known to be gone."""
    if lock.state == "released":
        return ""
    return Command(f"{printable(called)} release --key {lock.key}")


def _runner(lock: HeldLock, process: int | None) -> str:
    if not lock.entry.delivery:
        return "" if lock.entry.terminal else "no worker yet"
    [main] = lock.entry.delivery.rsplit("/", 3)[1:2] or [""]
    where = f", main process {main}" if main else ""
    if process is not None:
        of = f" of main process {main}" if main and main != str(process) else ""
        where = f", process {process}{of}"
    alive = _ahead(lock.entry.delivery_lease, lock.now)
    return f"{printable(lock.worker)}{printable(where)}; delivery lease ends {alive}"


def _show(screen: Screen, explanation: Explanation) -> None:
    screen.facts(
        [("key", explanation.key), ("made from", printable(explanation.made_from or ""))],
        indent="",
    )
    for lock in explanation.locks:
        screen.line()
        screen.line(screen.styled(f"Task {printable(lock.task_id)}", lock.state, bold=True))
        document = lock.as_document()
        screen.facts(
            (name.replace("_", " "), _shown(value))
            for name, value in document.items()
            if name not in ("key", "task_id", "age_s")
        )
    _show_marks(screen, explanation)
    screen.line()


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return moment(value)
    if value is None or value is False:
        return ""
    return "yes" if value is True else printable(str(value))


def _show_marks(screen: Screen, explanation: Explanation) -> None:
    for task_id, mark in explanation.marks.items():
        by = f" (by {printable(mark.by)})" if mark.by else ""
        screen.line()
        screen.words(
            f"Task {printable(task_id)} is marked {printable(mark.kind)}{by}: "
            f"{mark_meaning(mark.kind)}. The mark ends {_ahead(mark.until, explanation.now)}."
        )
    if explanation.more_marks:
        screen.line()
        screen.words(
            f"{explanation.more_marks} more tasks of this key are marked: give the id of one to "
            "see its mark."
        )


def _when(milliseconds: int) -> str:
    return moment(moment_of(milliseconds))


def _ahead(milliseconds: int, now: int) -> str:
    if not milliseconds:
        return ""
    left = milliseconds - now
    when = _when(milliseconds)
    return f"in {age(left)}, at {when}" if left > 0 else f"{age(-left)} ago, at {when}"


# -- for programs ------------------------------------------------------------------------


def _document(
    explanation: Explanation, processes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """``processes``, where they were asked for: task id -> the process that runs it."""
    verdict = explanation.verdict
    return {
        "key": explanation.key,
        "made_from": explanation.made_from,
        "policy": dict(explanation.policy) or None,
        "call": None
        if verdict is None
        else {"outcome": verdict.outcome, "task_id": verdict.task_id, "text": verdict.text},
        "tasks": [
            {
                **lock.as_document(),
                **({} if processes is None else {"process": processes.get(lock.task_id)}),
                "meaning": meaning(lock),
                "freed_by": freed_by(lock),
            }
            for lock in explanation.locks
        ],
        "marks": [
            {"task_id": task_id, "kind": mark.kind, "by": mark.by or None, "until_ms": mark.until}
            for task_id, mark in explanation.marks.items()
        ],
        "more_marks": explanation.more_marks,
    }
