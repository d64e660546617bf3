"""``celery unique release``: free keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import click

from celery_unique.cli import FOUND_NOTHING, UNAVAILABLE
from celery_unique.config.app_state import AppState
from celery_unique.operations.count import count_locks
from celery_unique.operations.release import release_all
from celery_unique.operations.select import Selection, select
from celery_unique.publish.stale_holders.lock_view import LockView
from celery_unique.publish.stale_holders.lost_messages import Unproven, missing_messages
from celery_unique.publish.stale_holders.workers import DEFAULT_TIMEOUT_S

from .options import json_option, lock_query, selection_of, selection_options, with_what
from .output import Screen, printable
from .stats import show_counts

Item = TypeVar("Item")

#: Locks between two lines of progress, where there is no terminal for a bar.
REPORT_EVERY = 1000

WARNING = (
    "This frees the keys and does not stop the tasks: one that waits or runs continues, and "
    "the next call may run beside it. To stop a task as well, revoke it."
)

PARKED = (
    "they stay parked, and a worker publishes the next one of each key, which may run beside a "
    "task that still runs."
)


@click.command("release", short_help="Free keys; does not stop their tasks.")
@click.argument("what", required=False)
@selection_options
@click.option(
    "--lost",
    is_flag=True,
    help="Whose message is proven lost: no queue and no worker has it (queries all of them).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="With --lost: how long workers have to reply, in seconds.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Every lock, where no other option selects."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only report what would be released.")
@json_option
@click.pass_context
def release_command(
    ctx: click.Context,
    /,
    what: str | None,
    lost: bool,
    timeout: float,
    everything: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Free the keys of the locks that the options select.

    WHAT is as for show: a key, whole or as list shows it, the id of a task, or its name.

    This is the step after 'celery purge', which deletes messages and leaves their locks. It does
    not stop the tasks: one that waits or runs continues, and the next call may run beside it.
    Asks for confirmation, except with --yes. Exits with 1 if nothing was released, and with 3 if
    nothing was and --lost could not decide on some locks: those are counted, with the reason.

    \b
    celery -A shop purge && celery -A shop unique release --lost
    celery -A shop unique release --task 'shop.*' --state waiting --older-than PT6H
    celery -A shop unique release --task shop.rebuild_index --args '[7]' --yes
    celery -A shop unique release 1:3f6c2a9d01be
    celery -A shop unique release --task-id 7c9e6679-7425-40de-944b-e07fc1f90ae7
    """
    command = lock_query(ctx, as_json)
    screen, app_state = command.screen, command.app_state
    selection = selection_of(app_state, with_what(app_state, what, given))
    lost_within_s = timeout if lost else None
    if selection.is_empty() and not everything and not lost:
        raise click.UsageError("Select locks with an option, or give --all.")
    unproven = Unproven() if lost else None
    counts = count_locks(_releasable(app_state, selection, lost_within_s, unproven))
    nothing = UNAVAILABLE if unproven and unproven.in_all else FOUND_NOTHING
    if not as_json and counts.total.locks:
        show_counts(screen, counts)
        screen.line()
    if not as_json and counts.parked:
        calls = "1 call is" if counts.parked == 1 else f"{counts.parked} calls are"
        screen.words(f"{calls} parked under these keys: {PARKED}", err=True)
    if not as_json and unproven is not None:
        _report_unproven(screen, unproven)
    if not counts.total.locks or dry_run:
        _report(screen, counts.total.locks, 0, as_json, dry_run, unproven)
        ctx.exit(0 if counts.total.locks else nothing)
    if not yes:
        screen.words(WARNING, err=True)
        click.confirm(f"Release {_locks(counts.total.locks)}?", abort=True, err=True)
    released = _release(app_state, selection, lost_within_s, counts.total.locks)
    _report(screen, counts.total.locks, released, as_json, dry_run, unproven)
    if not released:
        ctx.exit(nothing)


def _releasable(
    app_state: AppState,
    selection: Selection,
    lost_within_s: float | None,
    unproven: Unproven | None = None,
) -> Iterator[LockView]:
    # A second walk instead of a list: there may be millions.
    locks = (lock for lock in select(app_state, selection) if lock.state != "released")
    if lost_within_s is None:
        return locks
    return (unproven or Unproven()).proven(missing_messages(app_state, locks, lost_within_s))


def _release(
    app_state: AppState, selection: Selection, lost_within_s: float | None, expected: int
) -> int:
    releases = release_all(app_state, _releasable(app_state, selection, lost_within_s))
    return sum(done for _, done in _with_progress(releases, expected))


def _report_unproven(screen: Screen, unproven: Unproven) -> None:
    for locks, reason in unproven.in_words():
        are = "is" if locks == 1 else "are"
        screen.words(f"{_locks(locks)} {are} not known to be lost: {printable(reason)}.", err=True)


def _report(
    screen: Screen,
    matched: int,
    released: int,
    as_json: bool,
    dry_run: bool,
    unproven: Unproven | None,
) -> None:
    if as_json:
        document: dict[str, Any] = {"matched": matched, "released": released, "dry_run": dry_run}
        if unproven is not None:
            document |= {"unknown": unproven.in_all, "reasons": unproven.as_document()}
        screen.json(document)
    elif not matched and unproven is not None and unproven.in_all:
        screen.line("No lock is known to be lost.", err=True)
    elif not matched:
        screen.line("No lock matches.", err=True)
    elif dry_run:
        screen.line(f"{_locks(matched)} would be released.")
    else:
        screen.line(f"Released {_locks(released)}.")


def _locks(count: int) -> str:
    return f"{count} lock" if count == 1 else f"{count} locks"


def _with_progress(items: Iterator[Item], expected: int) -> Iterator[Item]:
    """The items, with a bar on a terminal, and else with a line now and then."""
    if sys.stderr.isatty():
        bar = click.progressbar(items, length=expected, label="Releasing", file=sys.stderr)
        with bar as shown:
            yield from shown
        return
    for done, item in enumerate(items, 1):
        yield item
        if done % REPORT_EVERY == 0:
            click.echo(f"{done} of {expected}", err=True)
