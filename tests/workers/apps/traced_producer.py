"""Producers that are killed at a chosen system call of a publish.

The program forks a process for each line of its standard input, which makes one call. It traces
that process with ptrace, every thread of it, stops it before and after each system call between
the beginning of the call and its return, and kills it at the stop that the line names.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

import celery_unique
from celery_unique.config.app_state import state_of
from tests.support.stage import STAGED, staged_app

TRACEME, SYSCALL, SETOPTIONS = 0, 24, 0x4200
OPTIONS = 0x1 | 0x8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
ALL_THREADS = 0x40000000  # __WALL
AT_SYSTEM_CALL = signal.SIGTRAP | 0x80

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, pid: int, data: int = 0) -> None:
    if libc.ptrace(request, pid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def pause() -> None:
    """Mark the beginning and the end of what is traced. A signal to the process could stop any of
    its threads."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def call(app: Any, kind: str, tag: str) -> None:
    """In the traced process: what precedes the call, and the call."""
    quick = app.tasks["quick"]
    if kind != "new, not connected":
        quick.delay(f"{tag}-before")
    if kind in ("duplicate", "replace"):
        quick.delay(tag)
    state_of(app).store.flush()
    ptrace(TRACEME, 0)
    pause()
    if kind == "apply_many":
        celery_unique.apply_many(quick.s(f"{tag}-{n}") for n in range(3))
    elif kind == "replace":
        quick.apply_async((tag,), unique_on_conflict="replace")
    else:
        quick.delay(tag)
    pause()


def trace(pid: int, kill_at: int) -> dict[str, Any]:
    """Let the process run to the stop ``kill_at``, or to the end of its call, and kill it."""
    os.waitpid(pid, ALL_THREADS)
    ptrace(SETOPTIONS, pid, OPTIONS)
    ptrace(SYSCALL, pid)
    stops = 0
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if not os.WIFSTOPPED(status):
            if thread == pid:
                return {"stops": stops, "outcome": f"ended: {status}"}
            continue
        stopped_by = os.WSTOPSIG(status)
        if stopped_by == AT_SYSTEM_CALL:
            stops += 1
        at_end = thread == pid and stopped_by == signal.SIGSTOP
        if at_end or stops == kill_at:
            os.kill(pid, signal.SIGKILL)
            reap(pid)
            return {"stops": stops, "outcome": "returned" if at_end else "killed"}
        event = stopped_by in (AT_SYSTEM_CALL, signal.SIGTRAP, signal.SIGSTOP)
        try:
            ptrace(SYSCALL, thread, 0 if event else stopped_by)
        except ProcessLookupError:
            continue


def reap(pid: int) -> None:
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if thread == pid and not os.WIFSTOPPED(status):
            return


def main() -> None:
    app = staged_app(**json.loads(os.environ[STAGED]))
    app.tasks["quick"].delay("imports")  # what a call needs
    state_of(app).store.flush()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                call(app, job["kind"], job["tag"])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        print(json.dumps(trace(pid, job["kill_at"])), flush=True)


if __name__ == "__main__":
    main()
