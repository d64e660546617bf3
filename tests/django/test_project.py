"""A project that has nothing but INSTALLED_APPS and settings."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.django.inside import inside_django
from tests.django.people import empty_store
from tests.support.worker import REPOSITORY


@inside_django
def test_shared_tasks_and_the_apps_own_are_unique():
    from tests.django.shop.tasks import plain, rebuild_index, send_digest

    empty_store()
    for task in (rebuild_index, send_digest):
        first, again, other = task.delay(7), task.delay(7), task.delay(8)

        assert (first.outcome, again.outcome, other.outcome) == (
            "created",
            "deduplicated",
            "created",
        )
        assert again.id == first.id
    assert rebuild_index.delay(shop_id=7, full=False).deduplicated
    assert plain.delay(7).id != plain.delay(7).id


@inside_django
def test_the_settings_of_the_project_are_read():
    from celery_unique.config.app_state import state_of
    from celery_unique.contrib.django.celery_app import project_app
    from celery_unique.stores.redis import RedisStore

    store = state_of(project_app()).store

    assert isinstance(store, RedisStore)
    assert store._layout.name_of("1:ab").startswith("shop:1:cu:{")  # the cache's own prefix


@inside_django
def test_a_base_class_of_the_projects_own_keeps_working():
    from celery.contrib.django.task import DjangoTask

    from tests.django.shop.tasks import Audited, audited, rebuild_index

    empty_store()
    before = audited.calls
    first, again = audited.delay(3), audited.delay(3)

    assert again.id == first.id
    assert audited.calls == before + 2, "its own apply_async is still called"
    assert isinstance(audited, Audited)
    assert isinstance(rebuild_index, DjangoTask), "the class that Celery chose is left alone"
    assert audited(3) == "audited tests.django.shop.tasks.audited"


@inside_django
def test_delay_on_commit_takes_the_lock_when_the_transaction_commits():
    from django.db import transaction

    from celery_unique import lookup
    from tests.django.shop.tasks import audited, rebuild_index

    empty_store()
    with transaction.atomic():
        assert rebuild_index.delay_on_commit(7) is None
        assert audited.apply_async_on_commit((7,)) is None
        assert lookup(rebuild_index, (7,)) is None
    held = lookup(rebuild_index, (7,))

    assert held is not None
    assert lookup(audited, (7,)) is not None
    assert rebuild_index.delay(7).id == held.task_id


@inside_django
def test_delay_on_commit_of_a_transaction_that_is_rolled_back_takes_no_lock():
    from django.db import transaction

    from celery_unique import lookup
    from tests.django.shop.tasks import rebuild_index

    empty_store()
    with transaction.atomic():
        rebuild_index.delay_on_commit(7)
        transaction.set_rollback(True)

    assert lookup(rebuild_index, (7,)) is None
    assert not rebuild_index.delay(7).deduplicated


@inside_django
def test_installing_again_by_hand_changes_nothing():
    import celery_unique
    from celery_unique.contrib.django.celery_app import install_in_apps, project_app
    from celery_unique.installation.fixup import UniqueFixup

    app = project_app()
    celery_unique.install(app)
    install_in_apps()

    assert sum(isinstance(fixup, UniqueFixup) for fixup in app._fixups) == 1


@inside_django
def test_an_app_that_is_made_later_knows_the_library_too():
    from celery import Celery

    later = Celery("later", broker="memory://", set_as_current=False)

    @later.task(unique=True)
    def work(number: int) -> None: ...

    first, again = work.delay(1), work.delay(1)

    assert again.id == first.id
    assert again.deduplicated


@inside_django
def test_other_programs_of_django_are_not_disturbed_by_the_model_without_a_table():
    from io import StringIO

    from django.core.management import call_command
    from django.db import connection

    out = StringIO()
    call_command("dumpdata", "celery_unique", stdout=out)
    call_command("dumpdata", "celery_unique", "--all", stdout=out)
    call_command("makemigrations", "--check", "--dry-run", stdout=StringIO())

    assert "".join(out.getvalue().split()) == "[][]"
    assert "celery_unique_no_table" not in connection.introspection.table_names()


def test_importing_the_library_loads_no_django():
    code = "import sys, celery_unique.stores; print('django' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"
