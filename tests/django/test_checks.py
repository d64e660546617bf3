"""What ``manage.py check`` says of the configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.django.inside import inside_django
from tests.support.worker import REPOSITORY


def found(**settings: Any) -> list[tuple[str, str, str]]:
    """Number, message and hint of every check that the project fails with these settings.

    Its Celery app reads Django's settings anew whenever it is asked.
    """
    from django.test import override_settings

    from celery_unique.contrib.django.checks import check_project

    with override_settings(**settings):
        return [(m.id.partition(".")[2], m.msg, m.hint or "") for m in check_project()]


@inside_django
def test_a_right_configuration_has_nothing_to_say():
    from django.core.management import call_command

    assert found() == []
    assert found(CELERY_UNIQUE_STORE_URL="django-db://default") == []
    assert (
        found(CELERY_UNIQUE_STORE_URL="redis://localhost/3", CELERY_UNIQUE_RUN_LEASE="PT2M") == []
    )
    call_command("check", fail_level="INFO")


@inside_django
def test_a_wrong_store_url_is_an_error_with_the_cure():
    [(number, message, hint)] = found(CELERY_UNIQUE_STORE_URL="postgres//db")
    assert (number, hint) == ("E001", "Set CELERY_UNIQUE_STORE_URL to the URL of a lock store.")
    assert "is not a URL" in message

    [(number, message, _)] = found(CELERY_UNIQUE_STORE_URL="mongodb://:hunter2@db/0")
    assert number == "E001"
    assert "no lock store for mongodb" in message
    assert "hunter2" not in message


@inside_django
def test_nothing_to_derive_a_store_from_is_an_error():
    [(number, message, _)] = found(
        CELERY_UNIQUE_STORE_URL=None, CELERY_BROKER_URL="amqp://", CELERY_BROKER_WRITE_URL="amqp://"
    )

    assert number == "E001"
    assert "unique_store_url is not set" in message


@inside_django
def test_a_wrong_value_is_an_error_that_names_the_setting():
    [(number, message, hint)] = found(CELERY_UNIQUE_RUN_LEASE="soon")

    assert (number, hint) == ("E002", "Correct CELERY_UNIQUE_RUN_LEASE in the settings.")
    assert "'soon'" in message


@inside_django
def test_a_cache_that_is_not_redis_is_an_error():
    caches = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

    [(number, message, hint)] = found(CACHES=caches)

    assert (number, hint) == ("E003", "Name a cache of CACHES whose backend is Redis.")
    assert "LocMemCache, which is not Redis" in message
    [(number, message, _)] = found(CELERY_UNIQUE_STORE_URL="django-cache://defualt")
    assert number == "E003"
    assert "Did you mean 'default'?" in message


@inside_django
def test_a_database_that_cannot_keep_locks_is_an_error():
    [(number, message, hint)] = found(CELERY_UNIQUE_STORE_URL="django-db://other")

    assert (number, hint) == (
        "E004",
        "Name a database of DATABASES that is PostgreSQL or SQLite.",
    )
    assert "DATABASES has no 'other'" in message


@inside_django
def test_an_unknown_setting_is_a_warning_with_the_nearest():
    [(number, message, hint)] = found(CELERY_UNIQUE_STOR_URL="redis://localhost/3")

    assert (number, hint) == ("W001", "Did you mean CELERY_UNIQUE_STORE_URL?")
    assert message.startswith("CELERY_UNIQUE_STOR_URL is not a setting")


@inside_django
def test_a_setting_without_its_prefix_is_a_warning():
    for name in ("UNIQUE_STORE_URL", "UNIQUE_STOR_URL", "UNIQUE_DEFAULT_FOR"):
        [(number, message, hint)] = found(**{name: "redis://localhost/3"})

        right = name.replace("STOR_", "STORE_")
        assert (number, hint) == ("W005", f"Write CELERY_{right}.")
        assert message.startswith(f"{name} has no effect")

    assert found(UNIQUE_VISITORS=7) == []  # of another app
    assert found(UNIQUE_TOGETHER_POLICY="x") == []


@inside_django
def test_the_memory_store_is_a_warning_unless_everything_is_in_one_process():
    memory = {"CELERY_UNIQUE_STORE_URL": "memory://"}

    [(number, message, hint)] = found(**memory)

    assert number == "W002"
    assert "Every process has its own lock store" in message
    assert "django-cache://default" in hint
    assert found(**memory, CELERY_TASK_ALWAYS_EAGER=True) == []
    assert found(**memory, CELERY_BROKER_WRITE_URL="memory://") == []


@inside_django
def test_a_project_without_a_celery_app_is_a_warning():
    from celery import _state

    from celery_unique.contrib.django import celery_app as project
    from celery_unique.contrib.django.checks import check_project

    default, apps = _state.default_app, project._apps
    _state.default_app = None
    try:
        project._apps = list
        [nothing] = check_project()
        project._apps = lambda: [default, default]
        [several] = check_project()
    finally:
        _state.default_app, project._apps = default, apps

    assert (nothing.id, nothing.msg) == ("celery_unique.W003", "No Celery app was found.")
    assert "import it in shop/__init__.py" in nothing.hint
    assert (several.id, several.hint) == (
        "celery_unique.W003",
        "Call set_default() on the project's.",
    )


@inside_django
def test_settings_that_the_celery_app_does_not_read_are_a_warning():
    from celery import Celery, _state

    default = _state.default_app
    other = Celery("other", broker="redis://localhost/0", set_as_current=False)
    other.set_default()
    try:
        [(number, message, hint)] = found(CELERY_UNIQUE_RUN_LEASE="PT2M")
    finally:
        _state.default_app = default

    assert number == "W004"
    assert message == (
        "The Celery app 'other' does not read CELERY_UNIQUE_GATE_TIMEOUT, CELERY_UNIQUE_RUN_LEASE, "
        "CELERY_UNIQUE_STORE_TIMEOUT, CELERY_UNIQUE_STORE_URL."
    )
    assert "namespace='CELERY'" in hint


@inside_django
def test_a_missing_driver_is_met_with_the_command_that_brings_it():
    from celery_unique.contrib.django.checks import _store_error
    from celery_unique.stores.django.aliases import missing_package

    missing = missing_package("django-db://default", ModuleNotFoundError(name="psycopg"))
    found = _store_error(missing, "django-db://default")

    assert found.id == "celery_unique.E004"
    assert found.hint == 'Run pip install "celery-unique-tasks[django,sql]"'


def test_a_project_without_the_app_is_told_by_check(tmp_path):
    (tmp_path / "shop").mkdir()
    files = {
        "settings.py": "SECRET_KEY = 'x'\nINSTALLED_APPS = []\nUSE_TZ = True\n",
        "celery.py": "from celery import Celery\napp = Celery('shop', broker='memory://')\n"
        "app.autodiscover_tasks(['shop'], force=True)\n",
        "__init__.py": "from .celery import app as celery_app\n",
        "tasks.py": "from celery_unique import shared_task\n\n\n@shared_task(unique=True)\n"
        "def rebuild_index(shop_id): ...\n",
    }
    for name, text in files.items():
        (tmp_path / "shop" / name).write_text(text)
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}",
        "DJANGO_SETTINGS_MODULE": "shop.settings",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    checked = run("-m", "django", "check")
    installed = (tmp_path / "shop" / "settings.py").write_text(
        files["settings.py"].replace("[]", "['celery_unique.contrib.django']")
        + "CELERY_TASK_ALWAYS_EAGER = True\n"
    )

    assert "celery_unique.W006" in checked
    assert "duplicates run of shop.tasks.rebuild_index" in checked
    assert installed
    assert "W006" not in run("-m", "django", "check")


@inside_django
def test_every_check_is_in_the_documentation():
    import inspect
    import re
    from pathlib import Path

    from celery_unique.contrib.django import checks, task_backend

    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "use-django.md"
    documented = set(re.findall(r"`celery_unique\.([EW]\d{3})`", page.read_text(encoding="utf-8")))

    assert documented == set(
        re.findall(r"\b[EW]\d{3}\b", inspect.getsource(checks) + inspect.getsource(task_backend))
    )
