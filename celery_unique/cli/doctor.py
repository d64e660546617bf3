"""``celery unique doctor``: check store, workers and locks."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from celery_unique.cli import FOUND_NOTHING, UNAVAILABLE
from celery_unique.operations.doctor.report import Report, examine
from celery_unique.operations.select import installed_state
from celery_unique.publish.stale_holders.workers import DEFAULT_TIMEOUT_S
from celery_unique.stores.diagnosis import Level

from .options import GENERIC, json_option, program
from .output import Command, Screen, printable

#: --fail-on -> the levels of a finding that count.
FAIL_ON: dict[str, tuple[Level, ...]] = {
    "error": ("error",),
    "warning": ("error", "warning"),
    "never": (),
}


@click.command("doctor", short_help="Check store, workers and locks.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="How long workers have to reply, in seconds.",
)
@click.option(
    "--fail-on",
    type=click.Choice(list(FAIL_ON)),
    default="error",
    show_default=True,
    help="The lowest level of a finding that exits with 1.",
)
@json_option
@click.pass_context
def doctor_command(ctx: click.Context, /, timeout: float, fail_on: str, as_json: bool) -> None:
    """Check the store, the workers and the locks, with the cure of each finding.

    \b
    The store: its availability, clock, version, eviction, persistence; of each primary.
    The workers: whether they have this library, the same store and key version, and renew.
    The locks: tasks whose worker has died, or whose message is lost; calls that follow another
    one and are monitored by no worker.

    Changes no lock. Exits with 1 if there is an error, with --fail-on warning also if there is a
    warning; with 3 if the lock store is unavailable; else with 0.

    \b
    celery -A shop unique doctor
    celery -A shop unique doctor --fail-on warning
    celery -A shop unique doctor --json | jq '.findings[] | select(.level == "error")'
    """
    screen = Screen(colours=not getattr(ctx.obj, "no_color", False))
    report = examine(installed_state(ctx.obj.app), timeout)
    if as_json:
        screen.json(_document(report))
    else:
        _show(screen, report, program(ctx))
    if not report.store_answers:
        ctx.exit(UNAVAILABLE)
    if report.of_level(*FAIL_ON[fail_on]):
        ctx.exit(FOUND_NOTHING)


def _show(screen: Screen, report: Report, called: str) -> None:
    screen.facts((name, printable(value)) for name, value in report.facts.items())
    for server, facts in report.servers.items():
        screen.line()
        screen.line(screen.styled(printable(server), bold=True))
        screen.facts((name, printable(value)) for name, value in facts.items())
    screen.line()
    for right in report.passed.values():
        screen.line(f"{screen.styled('ok     ', 'ok')}  {printable(right)}")
    for finding in report.findings:
        level = screen.styled(finding.level.ljust(7), finding.level, bold=True)
        screen.words(printable(finding.message), first=f"{level}  ", indent=" " * 9)
        if finding.cure:
            arrow = f"{' ' * 9}{screen.styled('->', bold=True)} "
            # A cure may end with a command.
            text, command, options = finding.cure.partition(GENERIC)
            screen.words(printable(text.rstrip()), first=arrow, indent=" " * 12)
            if command:
                line = Command(printable(f"{called}{options}"))
                screen.words(line, first=" " * 12)
    screen.line()
    screen.line(_summary(report))


def _summary(report: Report) -> str:
    levels: tuple[Level, ...] = ("error", "warning")
    counts = [(len(report.of_level(level)), level) for level in levels]
    shown = [f"{count} {level}{'s' if count > 1 else ''}" for count, level in counts if count]
    return f"{', '.join(shown)}." if shown else "Nothing is wrong."


def _document(report: Report) -> dict[str, Any]:
    return {
        "healthy": not report.of_level("error", "warning"),
        "errors": len(report.of_level("error")),
        "warnings": len(report.of_level("warning")),
        "store": report.facts,
        "servers": report.servers,
        "failovers": [each.as_document() for each in report.failovers],
        "followers": _followers(report),
        "passed": report.passed,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "workers": {
            **report.workers.replies,
            **dict.fromkeys(report.workers.without),
            **dict.fromkeys(report.workers.silent),
        },
    }


def _followers(report: Report) -> dict[str, int] | None:
    if report.followed is None:
        return None
    return {"calls": report.followed.calls, "overdue": report.followed.overdue}
