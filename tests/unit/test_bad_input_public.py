"""Everything wrong that a caller can say, said through the public API.

The wrong values, names and clashes of ``wrong_input`` and ``wrong_urls``, given to policies, calls,
definitions, annotations, documents, settings and URLs of real apps, and arguments from which no
key can be made. Each time the error names what is wrong and says what to do, nothing is published
and no lock is left. How many they are is printed by the test of the surfaces.
"""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery

import celery_unique
from celery_unique import (
    CeleryUniqueError,
    ConfigurationError,
    InvalidPolicy,
    UniqueKeyError,
    UniquePolicy,
)
from celery_unique.config.settings import DEFAULT_SETTINGS, SETTINGS
from celery_unique.policy.fields import OPTION_OF
from celery_unique.policy.ojs import OJS_FIELDS
from celery_unique.policy.option_names import CALL_ONLY, OPTION_FIELDS, TASK_OPTIONS
from celery_unique.stores import BUILT_IN, known_schemes
from tests.support.app import locks, make_app, messages, plain_app
from tests.support.calls import nested
from tests.unit.config.wrong_urls import CANNOT_BE_WRONG, WRONG_URLS, django_settings
from tests.unit.wrong_input import (
    BESIDE,
    CLASHES,
    NOT_DURATIONS,
    SETTING_OF,
    WRONG_DURATIONS,
    WRONG_SETTINGS,
    as_options,
    misspellings,
    waits_for_a_task,
    wrong_documents,
    wrong_values,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::celery_unique.exceptions.UniquePolicyWarning",
    "ignore::celery_unique.exceptions.UniqueSettingsWarning",
)

Options = dict[str, Any]

KINDS = ("type", "value", "unknown", "clash")

#: A message says what to do: it asks for something, or names what was meant.
A_CURE = re.compile(
    r"\b(?:give|use|write|add|leave it out|set (?:True|unique_\w+)|put)\b|did you mean|"
    r"every item is a string|so name the headers",
    re.IGNORECASE,
)
SAYS_WHAT_TO_PASS = re.compile(r"\bPass\b|must be a string of|as keyword arguments")


def pay(a: Any, b: Any = None) -> None: ...


def define(app: Celery, **options: Any) -> Any:
    return app.task(name="shop.pay", shared=False, typing=False, **options)(pay)


class Case(NamedTuple):
    surface: str
    kind: str  # type, value, unknown or clash
    name: str  # what the error must name
    attempt: Callable[[], Any]
    app: Celery
    error: type[CeleryUniqueError] = InvalidPolicy
    meant: str = ""  # the right name, which the error must give
    shown: str = ""
    traces: Callable[[], list[str]] = list  # of the attempt, beside messages and locks


# -- the ways to say an option ---------------------------------------------------------------------


class Ways:
    """One app on which every way of calling is tried again and again."""

    def __init__(self) -> None:
        self.app = make_app("memory://")
        self.unique = define(self.app, unique=True)
        self.defining = make_app("memory://")
        self.plain = self.app.task(name="shop.plain", shared=False)(pay)

    def of(self, options: Options) -> Iterator[tuple[str, Callable[[], Any], Celery]]:
        """Every way to say these options, on the app that must stay as it was."""
        unique, plain, app = self.unique, self.plain, self.app
        by_name = {"kwargs": {"a": 1}, "unique": True}
        yield "call", lambda: unique.apply_async((1,), **options), app
        yield "call of a plain task", lambda: plain.apply_async((1,), unique=True, **options), app
        yield "call by name", lambda: app.send_task("elsewhere.pay", **by_name, **options), app
        yield "signature", lambda: unique.s(1).set(**options).apply_async(), app
        yield "eager call", lambda: unique.apply((1,), **options), app
        beside = {"unique": UniquePolicy(), **options}
        yield "beside a policy", lambda: unique.apply_async((1,), **beside), app
        yield from self.of_tasks(options)

    def of_tasks(self, options: Options) -> Iterator[tuple[str, Callable[[], Any], Celery]]:
        defining, annotated = self.defining, make_app("memory://")
        annotated.conf.task_annotations = {"shop.pay": {"unique": True, **options}}
        yield "definition", lambda: define(defining, unique=True, **options).name, defining
        yield "annotation", lambda: define(annotated).delay(1), annotated


@pytest.fixture(scope="module")
def ways() -> Ways:
    return Ways()


def option_cases(ways: Ways) -> Iterator[Case]:
    for field, kind, value, meant in wrong_values():
        options = as_options({**BESIDE.get(field, {}), field: value})
        for surface, attempt, app in ways.of(options):
            name, shown = OPTION_OF[field], repr(value)
            yield Case(surface, kind, name, attempt, app, InvalidPolicy, meant, shown)
        policy = partial(UniquePolicy, **{**BESIDE.get(field, {}), field: value})
        yield Case("policy", kind, field, policy, ways.app, meant=meant, shown=repr(value))


def name_cases(ways: Ways) -> Iterator[Case]:
    for wrong, meant in misspellings(sorted(TASK_OPTIONS | CALL_ONLY)):
        if not wrong.startswith(("uniq", "idempot", "identity_s")):
            continue  # Celery takes any other name as an option of the message
        for surface, attempt, app in ways.of({wrong: 1}):
            if surface == "annotation" and not wrong.startswith(("unique_", "idempotency_")):
                continue  # any other name may be an attribute of the user's own
            yield Case(surface, "unknown", wrong, attempt, app, meant=meant)
    for name in sorted(CALL_ONLY):
        for surface, attempt, app in ways.of_tasks({name: 60}):
            yield Case(surface, "unknown", name, attempt, app)


def clash_cases(ways: Ways) -> Iterator[Case]:
    for fields in CLASHES:
        field = next(field for field in reversed(fields) if field != "on_conflict")
        policy = partial(UniquePolicy, **fields)
        yield Case("policy", "clash", field, policy, ways.app, shown=repr(fields))
        for surface, attempt, app in ways.of(as_options(fields)):
            # Above the default that has them, dimensions without arguments win.
            yield Case(surface, "clash", OPTION_OF[field], attempt, app, shown=repr(fields))
    for option in OPTION_FIELDS:
        value = {"unique_for": 60, "unique_by": "type", "unique_states": "window"}.get(option)
        value = value or {"unique_on_conflict": "reject", "unique_max_wait": 60}.get(option, "a")
        value = {"unique_key": "{a}", "identity_strategy": "strict"}.get(option, value)
        value = {"unique_limit": 2, "unique_max_queue": 2}.get(option, value)
        value = 60 if option == "unique_merge_max_bytes" else value
        call = partial(ways.plain.apply_async, (1,), **{option: value})
        yield Case("call of a plain task", "clash", option, call, ways.app, shown="set nowhere")
        definition = lambda given={option: value}: define(ways.defining, **given).name  # noqa: E731
        yield Case("definition", "clash", option, definition, ways.defining, shown="set nowhere")


def document_call_cases(ways: Ways) -> Iterator[Case]:
    for name, kind, document, meant in wrong_documents():
        at_a_call = partial(ways.unique.apply_async, (1,), unique=document)
        by_name = partial(ways.app.send_task, "else.where", kwargs={"a": 1}, unique=document)
        for surface, attempt in {"at a call": at_a_call, "by name": by_name}.items():
            shown = f"document {document!r}"
            yield Case(
                f"document {surface}", kind, name, attempt, ways.app, meant=meant, shown=shown
            )


# -- idempotency keys, headers and arguments -------------------------------------------------------


def idempotency_cases(ways: Ways) -> Iterator[Case]:
    def case(kind: str, name: str, error: type[CeleryUniqueError], **options: Any) -> Case:
        attempt = lambda: ways.unique.apply_async((1,), **options)  # noqa: E731
        return Case("call", kind, name, attempt, ways.app, error, shown=repr(options))

    for value in (1, b"k", ["k"], object(), 1.5):
        yield case("type", "idempotency_key", UniqueKeyError, idempotency_key=value)
    for value in ("", "k" * 256):
        yield case("value", "idempotency_key", UniqueKeyError, idempotency_key=value)
    for kind, values in {"type": NOT_DURATIONS, "value": WRONG_DURATIONS}.items():
        for value in values:
            options = {"idempotency_key": "k", "idempotency_ttl": value}
            yield case(kind, "idempotency_ttl", InvalidPolicy, **options)
    yield case("clash", "idempotency_ttl", InvalidPolicy, idempotency_ttl=60)
    yield case("value", "tenant", UniqueKeyError, unique_meta="tenant")
    yield case("value", "tenant", UniqueKeyError, unique_meta="tenant", headers={"other": "a"})
    yield case("type", "tenant", UniqueKeyError, unique_meta="tenant", headers={"tenant": object()})


WITHOUT_A_KEY: dict[str, list[Any]] = {
    "type": [object(), object, len, lambda: None, (x for x in "a"), 1j, Ellipsis, math, range(2)],
    "value": [math.nan, math.inf, -math.inf, "\ud800", {"\ud800": 1}, nested(3000),
              {"é": 1, "e\u0301": 2}],
}  # fmt: skip


def argument_cases(ways: Ways) -> Iterator[Case]:
    for kind, values in WITHOUT_A_KEY.items():
        for value in values:
            for within in (value, [value], {"inner": [value]}):
                for args, kwargs, name in (((within,), {}, "a"), ((1,), {"b": within}, "b")):
                    attempt = partial(ways.unique.apply_async, args, kwargs)
                    shown = type(value).__name__
                    yield Case("argument", kind, f"'{name}'", attempt, ways.app, UniqueKeyError,
                               "unique_key=", shown)  # fmt: skip
    fitting: list[tuple[str, Any, Any, str]] = [
        ("unknown", (1,), {"c": 1}, "'c'"),
        ("clash", (1,), {"a": 1}, "'a'"),
        ("value", (), {}, "'a'"),
        ("value", (1, 2, 3), {}, "shop.pay"),
    ]
    for kind, args, kwargs, name in fitting:
        attempt = partial(ways.unique.apply_async, args, kwargs)
        yield Case("argument", kind, name, attempt, ways.app, UniqueKeyError, shown=repr(kwargs))
    by_name = lambda: ways.app.send_task("elsewhere.pay", (1,), unique=True)  # noqa: E731
    yield Case("argument", "value", "elsewhere.pay", by_name, ways.app, UniqueKeyError, "keyword")


# -- settings and URLs: said once for an app, found at its first unique call ----------------------


def call_of(**conf: Any) -> tuple[Callable[[], Any], Celery]:
    app = plain_app(**{"unique_store_url": "memory://", **conf})
    celery_unique.install(app)
    return lambda: define(app, unique=True).delay(1), app


def installed_call(app: Celery, settings: Options) -> Any:
    celery_unique.install(app, **settings)
    return define(app, unique=True).delay(1)


def setting_cases() -> Iterator[Case]:
    durations = {"type": NOT_DURATIONS, "value": WRONG_DURATIONS}
    for name in SETTINGS:
        for kind, values in WRONG_SETTINGS.get(name, durations).items():
            for value in values:
                attempt, app = call_of(**{name: value})
                yield Case("setting", kind, name, attempt, app, ConfigurationError, "", repr(value))
                given, app = {"store_url": "memory://", name: value}, plain_app()
                attempt = partial(installed_call, app, given)
                yield Case("install", kind, name, attempt, app, ConfigurationError, "", repr(value))
    for field, kind, value, meant in wrong_values():
        fields = {**BESIDE.get(field, {}), field: value}
        attempt, app = call_of(**defaults(fields))
        name = SETTING_OF[OPTION_OF[field]]
        yield Case("default", kind, name, attempt, app, ConfigurationError, meant, repr(value))
    for fields in CLASHES:
        if not waits_for_a_task(fields):
            attempt, app = call_of(**defaults(fields))
            name = next(field for field in reversed(fields) if field != "on_conflict")
            named = SETTING_OF[OPTION_OF[name]].removeprefix("unique_default_")
            shown = repr(fields)
            yield Case("default", "clash", named, attempt, app, ConfigurationError, "", shown)
            app = plain_app()
            attempt = partial(installed_call, app, defaults(fields))
            yield Case("install", "clash", named, attempt, app, ConfigurationError, "", shown)
    for wrong, meant in misspellings((*SETTINGS, *DEFAULT_SETTINGS)):
        app = plain_app()
        install = lambda app=app, wrong=wrong: celery_unique.install(app, **{wrong: 1})  # noqa: E731
        yield Case("install", "unknown", wrong, install, app, ConfigurationError, meant)


def defaults(fields: Options) -> Options:
    return {SETTING_OF[option]: value for option, value in as_options(fields).items()}


def scheme_cases() -> Iterator[Case]:
    name = "unique_store_url"
    for wrong, meant in misspellings(known_schemes()):
        if wrong.lower() not in known_schemes():
            attempt, app = call_of(unique_store_url=f"{wrong}://me:hunter2@host/0")
            right = f"{meant}://"
            yield Case("scheme", "unknown", name, attempt, app, ConfigurationError, right, wrong)
    for broker in ("amqp://me:hunter2@host", "sqs://", "filesystem://", "pyamqp://", "kafka://h"):
        for backend in (None, "rpc://", "db+sqlite:///x", "cache+memory://", "file:///tmp/x"):
            conf = {"broker_url": broker, "result_backend": backend, "unique_store_url": None}
            attempt, app = call_of(**conf)
            yield Case("scheme", "value", name, attempt, app, ConfigurationError, shown=repr(conf))


class Nobody:
    """A server that must not be called, and a directory in which no file may be made.

    So it is told before anything connects that a URL is wrong, and no lock can be left.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def traces(self) -> list[str]:
        found = [f"the file {path.name} was made" for path in self.directory.iterdir()]
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return found
        return [*found, "the server was called"]

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[Nobody]:
    nobody = Nobody(tmp_path)
    yield nobody
    nobody.close()


OF_DJANGO = ("django-cache", "django-db")


def url_cases(nobody: Nobody) -> Iterator[Case]:
    yield from (case for scheme in WRONG_URLS for case in cases_of(scheme, nobody))


def cases_of(scheme: str, nobody: Nobody) -> Iterator[Case]:
    """Each URL is said by an app that publishes where the store is away: this is no such case."""
    for kind, urls in WRONG_URLS[scheme].items():
        for wrong, named in urls:
            url = wrong.format(port=nobody.port, directory=nobody.directory)
            attempt, app = call_of(unique_store_url=url, unique_on_store_error="publish")
            yield Case(f"{scheme}:// URL", kind, "unique_store_url", attempt, app,
                       ConfigurationError, named, url, nobody.traces)  # fmt: skip


# -- the tests -------------------------------------------------------------------------------------


def faults(cases: Iterator[Case]) -> list[str]:
    """Try each one; what was wrong with the answer."""
    found = []
    for case in cases:
        where = f"{case.surface}, {case.name}, {case.kind}, {case.shown}"
        found += [f"{where}: {fault}" for fault in _faults(case)]
    return found


def _faults(case: Case) -> Iterator[str]:
    try:
        answer = case.attempt()
    except CeleryUniqueError as error:
        message = str(error)
        if type(error) is not case.error:
            yield f"{type(error).__name__} in place of {case.error.__name__}: {message}"
        if case.name not in message:
            yield f"the error does not name it: {message}"
        if case.meant not in message:
            yield f"the error does not say {case.meant}: {message}"
        if not (A_CURE.search(message) or SAYS_WHAT_TO_PASS.search(message)):
            yield f"the error does not say what to do: {message}"
        if "hunter2" in message:
            yield f"the error tells a password: {message}"
    except Exception as error:
        yield f"not one of our errors: {error!r}"
    else:
        yield f"no error, but {answer!r}"
    if messages(case.app):
        yield "something was published"
    if case.error is not ConfigurationError and locks(case.app):
        yield "a lock is left"
    yield from case.traces()


def test_wrong_values_of_options(ways):
    assert faults(option_cases(ways)) == []


def test_wrong_names_of_options(ways):
    assert faults(name_cases(ways)) == []


def test_options_that_clash(ways):
    assert faults(clash_cases(ways)) == []


def test_wrong_documents(ways):
    assert faults(document_call_cases(ways)) == []


def test_wrong_idempotency_keys_and_headers(ways):
    assert faults(idempotency_cases(ways)) == []


def test_arguments_without_a_key(ways):
    assert faults(argument_cases(ways)) == []


def test_wrong_settings():
    assert faults(setting_cases()) == []


def test_wrong_schemes():
    assert faults(scheme_cases()) == []


@pytest.mark.parametrize("scheme", [scheme for scheme in WRONG_URLS if scheme not in OF_DJANGO])
def test_wrong_urls(scheme, nobody):
    assert faults(cases_of(scheme, nobody)) == []


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize("scheme", OF_DJANGO)
def test_wrong_urls_of_django(scheme, tmp_path):
    # In a process of its own: Django can be configured once.
    program = "from tests.unit.test_bad_input_public import tell; tell(*__import__('sys').argv[1:])"

    done = subprocess.run(
        [sys.executable, "-c", program, scheme, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert json.loads(done.stdout.splitlines()[-1]) == []


def tell(scheme: str, directory: str) -> None:
    """Print what was wrong with the answers to this scheme's URLs, in a Django project."""
    from django.conf import settings

    nobody = Nobody(Path(directory))
    settings.configure(**django_settings(directory, nobody.port))
    print(json.dumps(faults(cases_of(scheme, nobody))))


#: Surfaces and kinds of wrong that cannot be tried together, and why.
CANNOT_EXIST = {
    ("setting", "unknown"): "a name in an app's configuration may be somebody else's: a warning",
    ("setting", "clash"): "only the defaults for policies bear on each other: 'default'",
    ("scheme", "type"): "a URL that is no string is a wrong setting, and tried as one",
    ("scheme", "clash"): "a scheme is one word",
    **{(f"{scheme}:// URL", kind): why for (scheme, kind), why in CANNOT_BE_WRONG.items()},
}


def test_every_surface_has_every_kind_of_wrong_and_how_many_were_tried(ways, nobody, report):
    of_ways = (
        *(option_cases, name_cases, clash_cases, document_call_cases),
        *(idempotency_cases, argument_cases),
    )
    of_apps = (setting_cases(), scheme_cases(), url_cases(nobody))

    cases = [case for each in (*(of(ways) for of in of_ways), *of_apps) for case in each]

    tried = Counter((case.surface, case.kind) for case in cases)
    report(f"bad input: {len(cases)} tried, {dict(Counter(case.kind for case in cases))}")
    report(f"  {dict(Counter(case.surface for case in cases))}")
    pairs = {(surface, kind) for surface, _ in tried for kind in KINDS}
    assert pairs - tried.keys() == set(CANNOT_EXIST)
    assert {kind for _, kind in tried} == set(KINDS)
    assert all(CANNOT_EXIST.values()), "each has a reason"
    untried = {*SETTINGS, *DEFAULT_SETTINGS, *OPTION_FIELDS, *OJS_FIELDS}
    assert untried - {case.name for case in cases} == set()


def test_every_scheme_has_wrong_urls():
    assert WRONG_URLS.keys() == BUILT_IN.keys()
