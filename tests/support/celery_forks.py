"""``python -m celery`` without the second that it takes to import Celery, kombu and their like.

A program of its own, not a module of the tests: it has imported those libraries, and is forked
for each command. The fork is what a new process would be: it has its own session, directory,
environment, import path and log, it goes through Celery's ``__main__``, and it imports this
library and the app itself. What depends on being first, gevent's patches, needs a new process.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
import time
from multiprocessing.connection import Connection

LIBRARIES = (
    *("celery.apps.worker", "celery.bin.worker", "celery.bin.amqp", "celery.worker.worker"),
    *("celery.worker.components", "celery.worker.consumer", "celery.backends.redis"),
    *("celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread"),
    *("celery.app.builtins", "celery.events.state", "kombu.transport.redis"),
    *("kombu.transport.pyamqp", "sqlalchemy", "tornado.web"),
)
#: Imported by each fork: what is tested, what imports it, and what looks into its environment.
FRESH = ("celery_unique", "tests", "celery.bin.celery", "flower", "prometheus_client")


def main(connection: Connection) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.startswith(FRESH)]
    gc.freeze()
    ended: dict[int, int] = {}
    while True:
        try:
            order, *details = connection.recv()
        except EOFError:  # the tests are over
            return
        if order == "exit code":
            connection.send(_exit_code(ended, *details))
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            become(*details)
            return
        ended.pop(pid, None)  # of an earlier process with the same number
        connection.send(pid)


def _exit_code(ended: dict[int, int], pid: int) -> int | None:
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended.get(pid)


def become(
    arguments: list[str], directory: str, environment: dict[str, str], files: tuple[str, str, str]
) -> None:
    """Run ``python -m celery`` with these arguments, in this process; ``files`` are its standard
    input, output and errors."""
    os.setsid()
    for number, path in enumerate(files):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if number else os.O_RDONLY
        file = os.open(path, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    more = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [directory, *more]
    importlib.invalidate_caches()
    sys.argv[1:] = arguments
    runpy.run_module("celery", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
