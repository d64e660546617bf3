"""A plain Celery task goes through pytest-celery's setup, whatever its nodes are made of."""

from __future__ import annotations

from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup

from tests.smoke.tasks import add


def test_a_task_runs_through_the_whole_setup(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    worker = celery_setup.worker

    result = add.s(2, 3).apply_async(queue=worker.worker_queue)

    assert result.get(timeout=RESULT_TIMEOUT) == 5
    worker.assert_log_exists(f"Task smoke.add[{result.id}] succeeded")
    assert worker.hostname() in worker.logs()


def test_a_killed_worker_comes_back_and_runs_what_waited(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker

    worker.kill()
    waiting = add.s(20, 3).apply_async(queue=worker.worker_queue)
    worker.restart()

    assert waiting.get(timeout=RESULT_TIMEOUT) == 23
