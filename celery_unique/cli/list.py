"""``celery unique list``: one row for each lock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import click

from celery_unique.keys.digest import short_key
from celery_unique.operations.select import brief, select_with_lanes
from celery_unique.publish.stale_holders.lock_view import RELEASED, LockView

from .options import json_option, lock_query, selection_of, selection_options
from .output import Screen, Table

#: --sort -> the key of a row.
ORDERS: dict[str, Callable[[LockView], Any]] = {
    "age": lambda lock: -lock.age_ms,
    "task": lambda lock: (lock.entry.task_name, -lock.age_ms),
    "absorbed": lambda lock: (-lock.entry.duplicates, -lock.age_ms),
}
#: More locks are not kept in memory to sort them.
MOST_SORTED = 10_000

#: Narrower terminals show neither ids nor workers: a shortened key is enough for show and why.
WIDE = 118
_ID = 36
_STATE = 10
_AGE = 7
_ABSORBED = 8


@click.command("list", short_help="List locks: which task holds which key.")
@selection_options
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many.")
@click.option(
    "--sort",
    type=click.Choice([*ORDERS, "none"]),
    help="By age (the oldest first), task, or number of duplicates absorbed (the most first).",
)
@json_option
@click.pass_context
def list_command(
    ctx: click.Context, /, limit: int | None, sort: str | None, as_json: bool, **given: Any
) -> None:
    """List the locks: which task holds which key, since when, and how many calls it absorbed.

    One row for each task: a key can have several. The oldest come first; with --sort none, as with
    --json, rows come as the store is walked, in no order. AGE is the time since the call, ABSORBED
    the number of duplicates; calls that wait for their turn under the key are counted behind the
    name of the task, with the position of the one whose id is given. A key that no task holds, and
    under which calls are parked, has the state parked. A shortened key and an id are both accepted
    by show, why and release. A lock that was released manually holds nothing, and is listed with
    --state released. With --json every line is one lock, with its whole key.

    \b
    celery -A shop unique list
    celery -A shop unique list --task 'shop.*' --state waiting --older-than 1h
    celery -A shop unique list --task shop.rebuild_index --args '[7]'
    celery -A shop unique list --state active --json | jq -r .worker
    """
    command = lock_query(ctx, as_json)
    selection = selection_of(command.app_state, given)
    locks: Iterable[LockView] = (
        lock
        for lock in select_with_lanes(command.app_state, selection)
        # A released lock holds nothing.
        if lock.state != RELEASED or RELEASED in selection.states
    )
    if (order := ORDERS.get(sort or ("none" if as_json else "age"))) is not None:
        locks = _sorted(locks, order, limit, command.screen)
    table = LockTable(command.screen)
    is_empty = True
    for lock in islice(locks, limit):
        is_empty = False
        if as_json:
            command.screen.json(lock.as_document())
        else:
            table.row(lock)
    if is_empty and not as_json:
        command.screen.line("No locks.", err=True)


def _sorted(
    locks: Iterable[LockView], order: Callable[[LockView], Any], limit: int | None, screen: Screen
) -> Iterator[LockView]:
    """In bounded memory: the first ones of all, or all of so many."""
    if limit is not None and limit <= MOST_SORTED:
        yield from heapq.nsmallest(limit, locks, key=order)
        return
    locks = iter(locks)
    yield from sorted(islice(locks, MOST_SORTED), key=order)
    for more, lock in enumerate(locks):
        if not more:
            screen.line(f"More than {MOST_SORTED} locks: the others in no order.", err=True)
        yield lock


class LockTable:
    """One row a lock, as wide as the terminal."""

    def __init__(self, screen: Screen) -> None:
        width = screen.width()
        self._wide = width >= WIDE
        columns = [("KEY", 14), ("STATE", _STATE), ("AGE", _AGE), ("ABSORBED", _ABSORBED)]
        if self._wide:
            columns.append(("ID", _ID))
        used = sum(size for _, size in columns) + 2 * len(columns)
        # The worker is last, so that a long task name shifts no other column.
        task_width = max(12, min(40, width - used - 22) if self._wide else width - used)
        columns.append(("TASK", task_width))
        if self._wide:
            columns.append(("WORKER", 20))
        cut = frozenset({"TASK"}) if screen.is_terminal() else frozenset()
        self._table = Table(screen, columns, cut=cut)

    def row(self, lock: LockView) -> None:
        entry = lock.entry
        cells = [short_key(lock.key), lock.state, brief(lock.age_ms), str(entry.duplicates)]
        name = entry.task_name or "(no task)"
        task = f"{name} ({entry.label})" if entry.label else name
        if lock.position:
            task += f" (+{lock.parked} parked, the call at position {lock.position})"
        elif lock.parked:
            task += f" (+{lock.parked} parked)"
        if self._wide:
            cells += [lock.task_id or "-", task, lock.worker or "-"]
        else:
            cells.append(task)
        self._table.row(cells, {1: lock.state})
