"""``celery -A app unique ...``: commands to inspect and release the locks of an app.

Celery loads this module with *every* command, also for a worker, so that it imports next to
nothing: a command is imported on first use. Other programs run the same commands with
:func:`main`, which keeps its signature::

    sys.exit(celery_unique.cli.main(app, ["list", "--json"], "manage.py celery_unique"))
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

__all__ = ["main", "unique"]

#: Each is a module ``NAME`` with the click command ``NAME_command``.
_COMMANDS = ("list", "show", "why", "release", "stats", "web", "doctor", "manifest")

#: Exit codes, see docs/reference/cli.md.
FOUND_NOTHING = 1
WRONG_USE = 2
UNAVAILABLE = 3


class LazyGroup(click.Group):
    """Imports a command on first use, and turns this library's errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]  # list is a module of this package

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = import_module(f"{__name__}.{name}")
        command: click.Command = getattr(module, f"{name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from celery_unique.exceptions import CeleryUniqueError

        try:
            return super().invoke(ctx)
        except CeleryUniqueError as error:
            from .output import printable

            click.echo(f"Error: {printable(str(error))}", err=True)
            ctx.exit(UNAVAILABLE if error.retryable else WRONG_USE)


@click.group(
    name="unique",
    cls=LazyGroup,
    short_help="Show which tasks hold the keys of unique tasks, and free keys.",
    epilog="Exit codes: 0 fine, 1 found nothing (doctor: found errors), 2 wrong use or "
    "configuration, 3 lock store unavailable (release --lost: also broker or workers).",
)
def unique(**_preload_options: Any) -> None:
    """Show which tasks hold the keys of unique tasks, explain why a call was dropped, free keys.

    \b
    celery -A shop unique list --state active
    celery -A shop unique why shop.rebuild_index --args '[7]'
    celery -A shop unique release --task 'shop.*' --state waiting
    celery -A shop unique doctor
    """


def main(
    app: Any,
    argv: Sequence[str] | None = None,
    prog_name: str = "celery unique",
    *,
    no_color: bool = False,
) -> int:
    """Run one command for ``app`` and return its exit code. ``argv``: without the program."""
    from celery.bin.base import CLIContext

    context = CLIContext(app=app, no_color=no_color, workdir=None)
    arguments = None if argv is None else [*argv]
    try:
        unique.main(args=arguments, prog_name=prog_name, obj=context)  # ends with SystemExit
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)


def _register_remote_control() -> None:
    """Register ``celery inspect unique_held`` in this process."""
    from celery_unique.worker import remote_control  # noqa: F401


_register_remote_control()
