"""The Worker of the test kit: a real worker, with a broker in a directory and no server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from celery import Celery

from tests.support import ProcessFailed, Worker, eventually, filesystem_settings, is_alive

pytestmark = pytest.mark.slow  # each test starts a worker

StartWorker = Callable[..., Worker]

APP = """
import os, time
from pathlib import Path
from celery import Celery
from tests.support import filesystem_settings

app = Celery("plain")
app.conf.update(filesystem_settings(Path(__file__).parent))

@app.task(name="plain.pid")
def pid():
    return os.getpid()

@app.task(name="plain.sleep")
def sleep(seconds):
    time.sleep(seconds)
    return seconds

@app.task(name="plain.once", unique=True)
def once():
    pass

@app.task(name="plain.environment")
def environment(name):
    return os.environ.get(name)
"""


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    """The client's side: it knows the tasks of plain_app by name only."""
    (tmp_path / "plain_app.py").write_text(APP)
    client = Celery("client", set_as_current=False)
    client.conf.update(filesystem_settings(tmp_path))
    return client


def call(app: Celery, name: str, *args: object, queue: str = "celery") -> object:
    return app.send_task(f"plain.{name}", args, queue=queue).get(timeout=15)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_worker_runs_tasks_on_every_pool(app, start_worker, tmp_path, pool):
    worker = start_worker("plain_app", pool=pool, python_path=[tmp_path])

    runs_in = call(app, "pid")

    assert runs_in in (worker.children() if pool == "prefork" else [worker.pid])


def test_a_worker_whose_app_is_not_installed_warns_of_tasks_with_options(
    app, start_worker, tmp_path
):
    worker = start_worker("plain_app", pool="solo", python_path=[tmp_path])

    worker.wait_for_log("not installed in this app: plain.once run without locks. Call celery_uniq")


def test_a_worker_stops_warmly(app, start_worker, tmp_path):
    worker = start_worker("plain_app", python_path=[tmp_path])
    running = app.send_task("plain.sleep", (1,))
    worker.wait_for_log("plain.sleep.* received")

    assert worker.stop() == 0

    assert running.get(timeout=15) == 1
    assert not worker.is_running()


def test_a_worker_takes_queues_arguments_and_environment(app, start_worker, tmp_path):
    worker = start_worker(
        "plain_app:app",
        pool="solo",
        queues=["reports"],
        args=["--max-tasks-per-child", "10"],
        env={"COLOUR": "green"},
        python_path=[tmp_path],
    )

    assert call(app, "environment", "COLOUR", queue="reports") == "green"
    assert worker.wait_for_log(r"Task plain\.environment\[.*\] succeeded")


def test_a_killed_worker_takes_its_pool_with_it(app, start_worker, tmp_path):
    worker = start_worker("plain_app", concurrency=2, python_path=[tmp_path])
    processes = [worker.pid, *worker.children()]
    app.send_task("plain.sleep", (60,))
    worker.wait_for_log("plain.sleep.* received")

    worker.kill()

    assert len(processes) >= 3
    assert worker.exit_code == -signal.SIGKILL
    assert not any(is_alive(pid) for pid in processes)


def test_a_frozen_worker_goes_on_when_it_is_let_go(app, start_worker, tmp_path):
    worker = start_worker("plain_app", pool="threads", python_path=[tmp_path])

    worker.sigstop()
    eventually(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    waiting = app.send_task("plain.pid")
    assert not waiting.ready()
    worker.sigcont()

    assert waiting.get(timeout=15) == worker.pid


def test_a_worker_that_cannot_start_shows_the_end_of_its_log(start_worker):
    with pytest.raises(ProcessFailed, match="no_such_module"):
        start_worker("no_such_module")


def test_a_worker_that_does_not_stop_in_time_is_killed_and_reported(app, start_worker, tmp_path):
    worker = start_worker("plain_app", python_path=[tmp_path])
    app.send_task("plain.sleep", (60,))
    worker.wait_for_log("plain.sleep.* received")

    with pytest.raises(ProcessFailed, match=r"did not end within 0.5 s of SIGTERM"):
        worker.stop(timeout=0.5)

    assert not worker.is_running()
