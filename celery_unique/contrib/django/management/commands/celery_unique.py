"""``manage.py celery_unique ...``: the commands of ``celery -A app unique``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from celery_unique.cli import main
from celery_unique.contrib.django.celery_app import project_app
from celery_unique.exceptions import ConfigurationError

NAME = "celery_unique"


class Command(BaseCommand):
    help = "Show which tasks hold the keys of unique tasks, and free keys: as celery -A app unique."
    #: ``doctor`` reports a wrong configuration.
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass the command line on unchanged, so that options and exit codes are the same."""
        ours, rest = _djangos_options().parse_known_args(argv[2:])
        program = f"{Path(argv[0]).name} {argv[1]}"
        sys.exit(_run(rest, program, no_color=ours.no_color))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        _run(["--help"], f"{Path(prog_name).name} {subcommand}")

    # -- call_command --------------------------------------------------------
    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, **options: Any) -> None:
        # The streams themselves: Django's wrapper would end each write with a new line.
        with redirect_stdout(self.stdout._out), redirect_stderr(self.stderr._out):
            code = _run(options["arguments"], f"manage.py {NAME}", no_color=options["no_color"])
        if code:
            raise CommandError(f"{NAME} ended with exit code {code}", returncode=code)


def _run(arguments: Sequence[str], program: str, *, no_color: bool = False) -> int:
    try:
        app = project_app()
    except ConfigurationError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    return main(app, arguments, program, no_color=no_color)


def _djangos_options() -> argparse.ArgumentParser:
    """Options of every command of manage.py; Django has applied them already."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings")
    parser.add_argument("--pythonpath")
    parser.add_argument("--no-color", action="store_true")
    return parser
