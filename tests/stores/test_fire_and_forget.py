"""The queue of fire-and-forget acts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores import fire_and_forget
from celery_unique.stores.fire_and_forget import FireAndForgetQueue
from tests.support import eventually


def test_acts_are_carried_out_in_the_order_they_came():
    queue = FireAndForgetQueue(timeout_s=5)
    done: list[int] = []

    for number in range(1000):
        queue.put(lambda number=number: done.append(number))  # type: ignore[misc]
    queue.flush()

    assert done == list(range(1000))


def test_flush_waits_for_the_act_in_hand():
    queue = FireAndForgetQueue(timeout_s=5)
    done: list[int] = []
    queue.put(lambda: (time.sleep(0.2), done.append(1)))

    queue.flush()

    assert done == [1]


def test_flush_with_a_time_out_gives_up_on_acts_that_get_on_too_slowly():
    queue = FireAndForgetQueue(timeout_s=5)
    may_end = threading.Event()
    for _ in range(3):
        queue.put(lambda: may_end.wait(5))

    with pytest.raises(StoreUnavailable, match="3 fire-and-forget acts"):
        queue.flush(0.05)

    may_end.set()
    queue.flush(5)


def test_a_failed_act_is_logged_and_the_next_one_carried_out(caplog):
    queue = FireAndForgetQueue(timeout_s=5)
    done: list[int] = []

    with caplog.at_level(logging.INFO, logger=fire_and_forget.__name__):
        queue.put(raising(StoreUnavailable("the store is down")))
        queue.put(raising(KeyError("1:secret")))
        queue.put(lambda: done.append(1))
        queue.flush()

    assert done == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "the store is down" in caplog.text
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_full_queue_makes_the_caller_wait_and_keeps_the_order():
    queue = FireAndForgetQueue(timeout_s=10, limit=3)
    done: list[int] = []

    for number in range(20):
        queue.put(lambda number=number: (time.sleep(0.005), done.append(number)))  # type: ignore[misc]
    queue.flush()

    assert done == list(range(20))


def test_a_queue_that_stays_full_is_passed_by():
    queue = FireAndForgetQueue(timeout_s=0.1, limit=1)
    over = threading.Event()
    done: list[threading.Thread] = []
    queue.put(over.wait)
    eventually(lambda: not queue._waiting)
    queue.put(lambda: None)

    queue.put(lambda: done.append(threading.current_thread()))
    over.set()

    assert done == [threading.current_thread()]


def test_flush_gives_up_on_acts_that_do_not_get_on():
    queue = FireAndForgetQueue(timeout_s=0.1)
    over = threading.Event()
    queue.put(over.wait)
    queue.put(over.wait)

    with pytest.raises(StoreUnavailable, match="2 fire-and-forget acts"):
        queue.flush()
    assert queue.drain(0.05) == 2
    over.set()

    assert queue.drain(5) == 0


def test_the_thread_ends_when_there_is_nothing_to_do(monkeypatch):
    monkeypatch.setattr(fire_and_forget, "IDLE_S", 0.05)
    queue = FireAndForgetQueue(timeout_s=5)
    queue.put(lambda: None)
    thread = queue._thread
    assert thread is not None

    thread.join(5)
    done: list[int] = []
    queue.put(lambda: done.append(1))
    queue.flush()

    assert not thread.is_alive()
    assert done == [1]


def test_a_forked_child_has_an_empty_queue_and_its_own_thread():
    queue = FireAndForgetQueue(timeout_s=5)
    over = threading.Event()
    reader, writer = os.pipe()
    queue.put(over.wait)
    for _ in range(3):
        queue.put(lambda: os.write(writer, b"parent\n"))

    pid = os.fork()
    if pid == 0:
        queue.put(lambda: os.write(writer, b"child\n"))
        queue.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    over.set()
    queue.flush()
    os.close(writer)

    with os.fdopen(reader) as lines:
        assert lines.read() == "child\nparent\nparent\nparent\n"


def test_where_no_thread_can_be_started_the_caller_carries_it_out(monkeypatch):
    def cannot_start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    queue = FireAndForgetQueue(timeout_s=5)
    done: list[int] = []

    queue.put(lambda: done.append(1))

    assert done == [1]
    queue.flush()


def test_at_exit_stores_that_are_down_are_waited_for_together(monkeypatch, caplog):
    clock = [100.0]
    waited: list[float] = []

    class Stuck(FireAndForgetQueue):
        def drain(self, timeout_s: float) -> int:
            waited.append(timeout_s)
            clock[0] += timeout_s
            return 1

    stuck = [Stuck(2.0), Stuck(2.0), Stuck(5.0)]
    with monkeypatch.context() as patched:
        patched.setattr(fire_and_forget, "_queues", stuck)
        patched.setattr(fire_and_forget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        fire_and_forget._drain_all()

    assert waited == [2.0, 0.0, 3.0]
    assert [record.args for record in caplog.records] == [(1, 2.0), (1, 2.0), (1, 5.0)]
