"""Tests that run inside a Django project, in a process of their own.

Django's settings belong to a process, and with them Celery's fix-up for Django and the
hooks of this library: in the process of the other tests they would be in the way. So one
process has the project ``tests.django.shop``, and a test marked ``@inside_django`` is
called there. It gets its fixtures as plain values.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


class FailedInside(AssertionError):
    """The test failed there; the message is its traceback."""


class DjangoProcess:
    """The project, set up and migrated. A context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, dict(environment)), daemon=True
        )
        self._process.start()
        theirs.close()

    def call(self, module: str, name: str, **values: Any) -> Any:
        """Call a function there, or the test behind an ``@inside_django``."""
        self._pipe.send((module, name, values))
        failure, answer = self._pipe.recv()
        if failure:
            raise FailedInside(failure)
        return answer

    def __enter__(self) -> DjangoProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    setup: str | None
    try:
        _set_up()
        setup = None
    except BaseException:
        setup = traceback.format_exc()
    while True:
        try:
            module, name, values = pipe.recv()
        except EOFError:
            return
        try:
            if setup is not None:
                raise RuntimeError(setup)
            function = getattr(import_module(module), name)
            pipe.send(("", inspect.unwrap(function)(**values)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def _set_up() -> None:
    import_module("tests.django.shop")
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def inside_django(test: Callable[..., None]) -> Callable[..., None]:
    """Run this test in the process of the fixture ``django_process``."""

    @functools.wraps(test)
    def outside(django_process: DjangoProcess, **values: Any) -> None:
        django_process.call(test.__module__, test.__name__, **values)

    own = inspect.signature(test)
    first = inspect.Parameter("django_process", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    outside.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[first, *own.parameters.values()]
    )
    return outside


def _is_set_up() -> bool:
    """Answered only when the project has been migrated."""
    return True
