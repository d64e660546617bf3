"""``manage.py celery_unique``: the same commands as ``celery -A shop unique``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.django.inside import inside_django
from tests.django.people import empty_store, hold, store
from tests.support.worker import REPOSITORY

MANAGE = (sys.executable, "-m", "tests.django.shop.manage", "celery_unique")
CELERY = (sys.executable, "-m", "celery", "-A", "tests.django.shop", "unique")


def run(
    command: tuple[str, ...], *arguments: str, environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """Exit code and output, without the name of the program in a usage line."""
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    texts = [
        re.sub(
            r"(?:python -m )?(manage\.py celery_unique|celery unique|__main__\.py unique)",
            "PROGRAM",
            text,
        )
        for text in (done.stdout, done.stderr)
    ]
    return done.returncode, texts[0], texts[1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("list", "--json"), 0),
        (("list", "--older-than", "soon"), 2),
        (("doctor", "--fail-on", "note"), 2),
    ],
)
def test_output_and_exit_code_are_those_of_celerys_command(
    django_process, shop_environment, arguments, code
):
    django_process.call("tests.django.people", "hold_one")

    through_django = run(MANAGE, *arguments, environment=shop_environment)
    through_celery = run(CELERY, *arguments, environment=shop_environment)

    assert through_django[0] == code
    age = re.compile(r'"age_s": [\d.]+')
    assert [age.sub("", str(part)) for part in through_django] == [
        age.sub("", str(part)) for part in through_celery
    ]


@inside_django
def test_call_command_writes_to_the_given_stream_and_raises_with_the_exit_code():
    from io import StringIO

    from django.core.management import CommandError, call_command

    empty_store()
    key = hold("shop.rebuild", "first")
    out = StringIO()

    call_command("celery_unique", "list", "--task", "shop.*", stdout=out)
    assert "first" in out.getvalue()

    call_command("celery_unique", "release", "--key", key, "--yes", stdout=out)
    assert store().read(key)[0].tasks["first"].released

    with pytest.raises(CommandError) as nothing:
        call_command("celery_unique", "show", "no-such-id", stdout=out, stderr=out)
    assert nothing.value.returncode == 1


@inside_django
def test_help_names_the_commands_and_how_they_are_called_here():
    from contextlib import redirect_stdout
    from io import StringIO

    from django.core.management import ManagementUtility

    out = StringIO()
    with redirect_stdout(out):
        ManagementUtility(["/srv/manage.py", "help", "celery_unique"]).execute()

    assert out.getvalue().startswith("Usage: manage.py celery_unique")
    for command in ("list", "show", "why", "release", "stats", "doctor", "manifest"):
        assert f"\n  {command} " in out.getvalue()
