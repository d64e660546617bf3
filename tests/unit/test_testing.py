"""What users' own tests can say about locks, with pytest and without."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from celery import Celery

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.testing import UniqueLocks, assert_created, assert_duplicate, locks_in_memory

pytest_plugins = ["pytester"]


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    # A store that no test may ask: nothing answers there.
    celery_unique.install(app, store_url="redis://127.0.0.1:1/0")
    app.conf.task_default_queue = uuid.uuid4().hex

    @app.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    @app.task(name="digest", unique=True, unique_for=600, unique_states="window", shared=False)
    def digest(user: str) -> None: ...

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    return app


@pytest.fixture
def locks(app: Celery) -> Iterator[UniqueLocks]:
    with locks_in_memory(app) as locks:
        yield locks


def test_locks_are_kept_in_memory_and_the_store_of_the_settings_is_not_asked(app, locks):
    first = app.tasks["rebuild"].delay(7)
    again = app.tasks["rebuild"].delay(shop_id=7)

    assert_created(first)
    assert_duplicate(again, of=first)
    assert [(lock.task_id, lock.duplicates) for lock in locks.held("rebuild")] == [(first.id, 1)]
    assert locks.held(app.tasks["digest"]) == []


def test_a_change_of_settings_during_the_test_changes_no_store(app, locks):
    first = app.tasks["rebuild"].delay(7)

    app.conf.unique_namespace = "other"

    assert_duplicate(app.tasks["rebuild"].delay(7), of=first)


def test_each_test_begins_empty_and_the_store_of_the_settings_is_back_afterwards(app):
    for _ in range(2):
        with locks_in_memory(app):
            assert_created(app.tasks["rebuild"].delay(7))

    assert type(state_of(app).store).__name__ == "RedisStore"


@pytest.mark.parametrize("by", [600, timedelta(minutes=10), "PT10M"])
def test_time_passes_when_the_test_says_so(app, locks, by):
    first = app.tasks["digest"].delay("ann")
    locks.end(first)
    assert_duplicate(app.tasks["digest"].delay("ann"), of=first)

    locks.advance(by)

    assert_created(app.tasks["digest"].delay("ann"))


def test_a_task_can_be_started_and_ended_without_a_worker(app, locks):
    rebuild = app.tasks["rebuild"]
    first = rebuild.delay(7)
    locks.assert_held(rebuild, (7,), by=first, state="available")

    locks.start(first)
    locks.assert_held("rebuild", kwargs={"shop_id": 7}, by=first, state="active")
    after = rebuild.apply_async((7,), unique_on_conflict="rerun")
    with pytest.raises(AssertionError, match="may not start now: wait"):
        locks.start(after)

    locks.end(first, "discarded")
    locks.start(after)
    locks.end(after)
    locks.assert_free(rebuild, (7,))


def test_a_task_that_waits_can_be_cancelled(app, locks):
    first = app.tasks["rebuild"].delay(7)

    locks.end(first, "cancelled")

    locks.assert_free("rebuild", (7,))
    with pytest.raises(AssertionError, match="holds no lock"):
        locks.end(first, "cancelled")


def test_an_assertion_that_fails_says_what_is_there(app, locks):
    rebuild = app.tasks["rebuild"]
    with pytest.raises(AssertionError, match=r"the key of rebuild\(7\) is free"):
        locks.assert_held(rebuild, (7,))
    first, other = rebuild.delay(7), rebuild.delay(8)
    again = rebuild.delay(7)

    with pytest.raises(AssertionError, match=f"held by task {first.id}, which is available"):
        locks.assert_free(rebuild, (7,))
    with pytest.raises(AssertionError, match=f"held by task {first.id}, not {other.id}"):
        locks.assert_held(rebuild, (7,), by=other)
    with pytest.raises(AssertionError, match="is available, not active"):
        locks.assert_held(rebuild, kwargs={"shop_id": 7}, state="active")
    with pytest.raises(AssertionError, match="no duplicate, but created"):
        assert_duplicate(first)
    with pytest.raises(AssertionError, match=f"a duplicate of task {first.id}, not of"):
        assert_duplicate(again, of=other)
    with pytest.raises(AssertionError, match="the call was deduplicated"):
        assert_created(again)
    with pytest.raises(celery_unique.CeleryUniqueError, match="was not unique"):
        locks.start(app.tasks["plain"].delay())


SHOP = """
    from celery import Celery
    import celery_unique

    app = Celery("shop", broker="memory://", backend="cache+memory://")
    celery_unique.install(app, store_url="redis://127.0.0.1:1/0")

    @app.task(unique=True)
    def rebuild_index(shop_id): ...
"""


def test_the_fixtures_are_there_when_the_plugin_is_named(pytester):
    pytester.makepyfile(shop=SHOP)
    pytester.makeconftest("""
        import pytest
        import shop
        pytest_plugins = ["celery_unique.testing"]

        @pytest.fixture
        def unique_app():
            return shop.app
    """)
    pytester.makepyfile("""
        import pytest
        from celery_unique.testing import assert_created
        from shop import rebuild_index

        @pytest.mark.parametrize("round", [1, 2])
        def test_is_free_at_first(unique_locks, round):
            assert_created(rebuild_index.delay(7))
            unique_locks.assert_held(rebuild_index, (7,))
            unique_locks.advance("P2D")
            unique_locks.assert_free(rebuild_index, (7,))
    """)

    result = pytester.runpytest_inprocess("-p", "no:celery", "-p", "no:valkey", "-p", "no:xdist")

    result.assert_outcomes(passed=2)


def test_unittest_needs_no_pytest(pytester):
    pytester.makepyfile(shop=SHOP)
    pytester.makepyfile(
        test_shop="""
        import sys
        import unittest
        from celery_unique.testing import assert_created, assert_duplicate, locks_in_memory
        from shop import app, rebuild_index

        class ShopTest(unittest.TestCase):
            def setUp(self):
                self.locks = self.enterContext(locks_in_memory(app))

            def test_a_second_call_is_a_duplicate(self):
                first = rebuild_index.delay(7)
                assert_created(first)
                assert_duplicate(rebuild_index.delay(7), of=first)
                self.assertNotIn("pytest", sys.modules)
    """
    )

    result = pytester.runpython_c(
        "import unittest, sys; sys.exit(unittest.main('test_shop', argv=['x']))"
    )

    assert result.ret == 0
    result.stderr.fnmatch_lines(["OK"])
