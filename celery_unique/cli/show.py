"""``celery unique show``: everything that is recorded under a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

import click

from celery_unique.cli import FOUND_NOTHING
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of
from celery_unique.exceptions import nearest
from celery_unique.operations.explain import (
    Explanation,
    explain_call,
    explain_idempotency_key,
    explain_record,
    freed_by,
    mark_meaning,
    meaning,
)
from celery_unique.operations.select import brief, find

from .options import (
    LockQuery,
    idempotency_key_of,
    json_option,
    lock_query,
    what_of,
    what_options,
)
from .output import Screen, moment, printable

#: A shortened key of few digits may match many.
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
    command = lock_query(ctx, as_json)
    what = what_of(what, given)
    found = False
    for explanation in explanations(command.app_state, what, given):
        recorded = explanation.locks or explanation.marks or explanation.more_marks
        if not (recorded or explanation.parked):
            continue
        found = True
        if as_json:
            command.screen.json(document(explanation))
        else:
            _show(command.screen, explanation, what)
    exit_if_nothing(ctx, command, found, what)


def exit_if_nothing(ctx: click.Context, command: LockQuery, found: bool, what: str | None) -> None:
    if found:
        return
    near = nearest(what, command.app_state.app.tasks)
    hint = f" Did you mean the task {printable(near)}?" if near and near != what else ""
    command.screen.line(f"Nothing is recorded of {printable(what or 'it')}.{hint}", err=True)
    ctx.exit(FOUND_NOTHING)


def explanations(
    app_state: AppState, what: str | None, given: dict[str, Any]
) -> Iterator[Explanation]:
    args, kwargs = given["args"], given["kwargs"]
    idempotency_key = idempotency_key_of(given)
    if idempotency_key is not None:
        yield explain_idempotency_key(app_state, what, idempotency_key, args, kwargs)
    elif what is None:
        raise click.UsageError("Name a key, a task's id, or a task and the arguments of a call.")
    elif what in app_state.app.tasks or args is not None or kwargs is not None:
        yield explain_call(app_state, what, args, kwargs)
    else:
        for key, record, now in islice(find(app_state, what), MOST):
            yield explain_record(app_state, key, record, now)


# -- for people --------------------------------------------------------------------------


def _show(screen: Screen, explanation: Explanation, what: str | None) -> None:
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
    show_parked(screen, explanation, what)
    show_marks(screen, explanation)
    screen.line()


def show_parked(screen: Screen, explanation: Explanation, what: str | None) -> None:
    """How many calls wait for their turn, the first of them, and the place of the one in
    question."""
    parked = explanation.parked
    if not parked:
        return
    calls = "1 call is" if len(parked) == 1 else f"{len(parked)} calls are"
    screen.line()
    if all(lock.entry.released for lock in explanation.locks):
        screen.words("No task holds the key: a worker publishes the next call.", kind="warning")
    screen.line(screen.styled(f"{calls} parked, the next one first", "waiting", bold=True))
    places = dict(enumerate(parked[:MOST], start=1))
    if what in parked:
        places[parked.index(what) + 1] = what
    screen.facts((f"position {place}", printable(task_id)) for place, task_id in places.items())
    if what in parked:
        place = parked.index(what) + 1
        screen.words(
            f"Call {printable(what)} is at position {place}, and runs when its turn comes. To "
            "remove it from the lane, revoke it."
        )


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return moment(value)
    if value is None or value is False:
        return ""
    return "yes" if value is True else printable(str(value))


def show_marks(screen: Screen, explanation: Explanation) -> None:
    for task_id, mark in explanation.marks.items():
        by = f" (by {printable(mark.by)})" if mark.by else ""
        screen.line()
        screen.words(
            f"Task {printable(task_id)} is marked {printable(mark.kind)}{by}: "
            f"{mark_meaning(mark.kind)}. The mark ends {ahead(mark.until, explanation.now)}."
        )
    if explanation.more_marks:
        screen.line()
        screen.words(
            f"{explanation.more_marks} more tasks of this key are marked: give the id of one to "
            "see its mark."
        )


def when(milliseconds: int) -> str:
    return moment(moment_of(milliseconds))


def ahead(milliseconds: int, now: int) -> str:
    if not milliseconds:
        return ""
    left = milliseconds - now
    moment_ = when(milliseconds)
    return f"in {brief(left)}, at {moment_}" if left > 0 else f"{brief(-left)} ago, at {moment_}"


# -- for programs ------------------------------------------------------------------------


def document(
    explanation: Explanation, processes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """``processes``, where they are known: task id -> the process that runs it."""
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
        "parked": [
            {"position": place, "task_id": task_id}
            for place, task_id in enumerate(explanation.parked, start=1)
        ],
    }
