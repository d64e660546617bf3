"""``celery unique stats``: count locks by task and state."""

from __future__ import annotations

import click

from celery_unique.operations.count import Counts, TaskCount, count_all
from celery_unique.operations.select import brief
from celery_unique.policy.states import STATES

from .options import json_option, lock_query
from .output import Screen, Table


@click.command("stats", short_help="Count locks by task and state.")
@json_option
@click.pass_context
def stats_command(ctx: click.Context, /, as_json: bool) -> None:
    """Count the locks by task and state, and the calls that they absorbed.

    Walks the whole store in batches, in bounded memory.

    \b
    celery -A shop unique stats
    celery -A shop unique stats --json | jq .states.active
    """
    command = lock_query(ctx, as_json)
    counts = count_all(command.app_state)
    if as_json:
        command.screen.json(counts.as_document())
    else:
        show_counts(command.screen, counts)
        command.screen.line()
        command.screen.line(
            f"{_number(counts.keys, 'key')}, {_number(counts.total.locks, 'lock')}, "
            f"{_number(counts.marks, 'mark')} of finished or "
            f"superseded tasks, {_number(counts.total.duplicates, 'call')} absorbed"
            + (f", {_number(counts.parked, 'call')} parked" if counts.parked else "")
        )


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def show_counts(screen: Screen, counts: Counts) -> None:
    """A row for each task, the one with most locks first, and a last one for all."""
    states = [state for state in (*STATES, "released") if counts.total.states[state]]
    names = sorted(counts.tasks, key=lambda name: (-counts.tasks[name].locks, name))
    columns = [("LOCKS", 7), ("ABSORBED", 8), ("OLDEST", 8)]
    columns += [(state.upper(), max(len(state), 6)) for state in states]
    table = Table(screen, [*columns, ("TASK", 20)], cut=frozenset())
    for name in names:
        table.row([*_cells(counts.tasks[name], states), name])
    if len(names) > 1:
        table.row([*_cells(counts.total, states), "(all)"])


def _cells(count: TaskCount, states: list[str]) -> list[str]:
    by_state = [str(count.states[state] or "-") for state in states]
    return [str(count.locks), str(count.duplicates), brief(count.oldest_ms), *by_state]
