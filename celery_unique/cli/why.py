"""``celery unique why``: explain why a call was dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from celery_unique.cli import FOUND_NOTHING
from celery_unique.header import DeliveryName
from celery_unique.operations.explain import (
    Explanation,
    beside_stale,
    freed_by,
    meaning,
    running_processes,
    why_stale,
)
from celery_unique.operations.select import brief
from celery_unique.publish.stale_holders.lock_view import LockView

from .options import json_option, lock_query, program, what_of, what_options
from .output import Command, Screen, printable
from .show import ahead, document, exit_if_nothing, explanations, show_marks, show_parked, when


@click.command("why", short_help="Explain why a call was dropped.")
@what_options
@json_option
@click.pass_context
def why_command(ctx: click.Context, /, what: str | None, as_json: bool, **given: Any) -> None:
    """Explain why a call was dropped: its key, the holder, and what frees the key.

    WHAT is the name of a task, with the arguments of a call or its idempotency key; or a key,
    whole or as list shows it; or the id of a task. For a call, this shows its outcome if it were
    made now, and the text that its key is the digest of: two calls are the same work if and
    only if that text is the same. Exits with 1 if nothing holds the key.

    \b
    celery -A shop unique why shop.rebuild_index --args '[7]'
    celery -A shop unique why shop.pay --idempotency-key order-7
    celery -A shop unique why 1:3f6c2a9d01be
    """
    command = lock_query(ctx, as_json)
    what = what_of(what, given)
    found = held = False
    for explanation in explanations(command.app_state, what, given):
        found = True
        held |= any(lock.state != "released" for lock in explanation.locks)
        processes = running_processes(command.app_state, explanation.locks)
        stale = why_stale(command.app_state, explanation.locks)
        explanation = beside_stale(explanation, stale)
        if as_json:
            shown = document(explanation, processes)
            for task in shown["tasks"]:
                task["stale"] = stale.get(task["task_id"])
            command.screen.json(shown)
        else:
            _explain(command.screen, explanation, what, program(ctx), processes, stale)
    if found and not held:
        ctx.exit(FOUND_NOTHING)
    exit_if_nothing(ctx, command, found, what)


def _explain(
    screen: Screen,
    explanation: Explanation,
    what: str | None,
    called: str,
    processes: Mapping[str, int],
    stale: Mapping[str, str],
) -> None:
    made_from = explanation.made_from
    screen.facts(
        [
            ("key", explanation.key),
            ("made from", printable(made_from) if made_from else "(unknown: the key is a digest)"),
            ("on conflict", str(explanation.policy.get("on_conflict", ""))),
            ("in states", " ".join(explanation.policy.get("states", ()))),
            ("limit", str(explanation.policy.get("limit", ""))),
            ("merges", ", ".join(explanation.policy.get("merge", ()))),
        ],
        indent="",
    )
    verdict = explanation.verdict
    if verdict is not None:
        by = f" ({printable(verdict.task_id)})" if verdict.task_id else ""
        runs = verdict.outcome in ("created", "replaced", "rerun", "queued", "merged")
        kind = "ok" if runs else "warning"
        screen.line()
        screen.words(f"A call now {verdict.text}{by}.", kind=kind, bold=True)
    elif not explanation.locks and not explanation.parked:
        screen.line()
        screen.line(screen.styled("The key is free.", "ok", bold=True))
    for lock in explanation.locks:
        process = processes.get(lock.task_id)
        _explain_lock(screen, lock, called, process, stale.get(lock.task_id, ""))
    show_parked(screen, explanation, what)
    show_marks(screen, explanation)


def _explain_lock(
    screen: Screen, lock: LockView, called: str, process: int | None, stale: str
) -> None:
    entry, now = lock.entry, lock.now
    screen.line()
    screen.line(screen.styled(f"Task {printable(lock.task_id)}", lock.state, bold=True))
    last = f", the last {brief(now - entry.last_duplicate_at)} ago" if entry.duplicates else ""
    calls = "call" if entry.duplicates == 1 else "calls"
    ways = freed_by(lock)
    screen.facts(
        [
            ("task", printable(entry.task_name)),
            ("state", f"{lock.state}: {meaning(lock)}"),
            ("called", f"{brief(lock.age_ms)} ago, at {when(entry.created_at)}"),
            ("ETA", ahead(entry.eta, now)),
            ("run by", _runner(lock, process)),
            ("absorbed", f"{entry.duplicates} {calls}{last}"),
            ("lease ends", ahead(entry.lease, now)),
            ("stale", printable(stale)),
            ("freed by", f"{ways[0]}"),
            *(("or by", way) for way in ways[1:]),
            ("manually", _release_command(lock, called)),
        ]
    )


def _release_command(lock: LockView, called: str) -> str:
    """The command that frees the key, for a task that is known to be lost."""
    if lock.state == "released":
        return ""
    return Command(f"{printable(called)} release --key {lock.key}")


def _runner(lock: LockView, process: int | None) -> str:
    if not lock.entry.delivery:
        return "" if lock.entry.terminal else "no worker yet"
    main = DeliveryName.parse(lock.entry.delivery).process
    where = f", main process {main}" if main else ""
    if process is not None:
        of = f" of main process {main}" if main and main != str(process) else ""
        where = f", process {process}{of}"
    alive = ahead(lock.entry.delivery_lease, lock.now)
    return f"{printable(lock.worker)}{printable(where)}; delivery lease ends {alive}"
