"""``make demo``: what unique tasks do, with a real worker and no server.

Starts a worker, calls tasks, counts, compares the figures with the expected ones, and cleans up.
The figures are counted outside the library: a published message and a run of a body each write
one line into a file.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

DEMO = Path(__file__).resolve().parent
PROCESSES, THREADS, CALLS_PER_THREAD = 4, 5, 5
BURST = PROCESSES * THREADS * CALLS_PER_THREAD
PATIENCE_S = 30


class Figures(NamedTuple):
    """The outcome of some calls."""

    calls: int
    published: int
    runs: int
    duplicates: int


class Scene(NamedTuple):
    title: str
    expected: Figures
    play: Callable[[], tuple[int, int]]  # calls made, duplicates among them


class DemoFailed(Exception):
    """A figure or a step of the demo is wrong; the message describes it."""


def main() -> int:
    ended = threading.Event()

    def end(*_: object) -> None:
        # Raised for the clean-up; recorded, since a running finaliser swallows it.
        ended.set()
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="celery-unique-demo-"))
    try:
        os.environ["CELERY_UNIQUE_DEMO"] = str(directory)
        sys.path.insert(0, str(DEMO))
        with running_worker(directory / "worker.log"):
            rows = [(scene, play(scene)) for scene in scenes()]
            check_nothing_more_ran(rows)
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if ended.is_set() else report(rows, time.monotonic() - began)


# -- The worker ------------------------------------------------------------------------------------


@contextmanager
def running_worker(log: Path) -> Iterator[None]:
    import shop

    _ = shop.app.AsyncResult("none").state  # makes the table of results, before two children would
    say("Starting a worker in a separate process; messages are files, locks and results SQLite.")
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "2"]
    quick = ["--loglevel", "INFO", "--without-gossip", "--without-mingle"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [*command, *quick],
            cwd=DEMO,
            env={**os.environ, "TMPDIR": str(log.parent)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until_ready(worker, log)
        yield
    except Exception:
        print(f"\nThe end of the worker's log:\n{log_tail(log)}", file=sys.stderr)
        raise
    finally:
        stop(worker)


def wait_until_ready(worker: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while " ready." not in log.read_text(errors="replace"):
        if worker.poll() is not None:
            raise DemoFailed(f"the worker ended with code {worker.returncode}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"the worker was not ready after {PATIENCE_S} seconds")
        time.sleep(0.05)


def stop(worker: subprocess.Popen[bytes]) -> None:
    """Kill the worker and its pool, which is in the same process group: no work is left, and a
    warm shutdown takes Celery six seconds with messages in files."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


# -- What is shown ---------------------------------------------------------------------------------


def scenes() -> list[Scene]:
    burst = f"{BURST} equal calls at once, {PROCESSES} processes with {THREADS} threads each"
    return [
        Scene(burst, Figures(BURST, 1, 1, BURST - 1), one_burst),
        Scene("5 calls with different arguments", Figures(5, 5, 5, 0), different_arguments),
        Scene("a second call, rejected", Figures(2, 1, 1, 1), rejected),
        Scene("at most once in 2 s: 2 calls inside, 1 after", Figures(3, 2, 2, 1), window),
        Scene("a task that fails, and is called again", Figures(2, 2, 2, 0), failure),
    ]


def one_burst() -> tuple[int, int]:
    """Callers in many processes and threads; every call returns the same id."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES * THREADS)
    answers = context.Queue()
    callers = [
        context.Process(target=caller, args=(barrier, answers), daemon=True)
        for _ in range(PROCESSES)
    ]
    with at_work():
        for process in callers:
            process.start()
        try:
            replies = [answers.get(timeout=PATIENCE_S) for _ in range(BURST)]
        except queue.Empty:
            raise DemoFailed("not every call of the burst returned") from None
        for process in callers:
            process.join(PATIENCE_S)
    ids = {task_id for task_id, _ in replies}
    say(f"rebuild_index: {BURST} calls returned {len(ids)} task id")
    check(len(ids) == 1, f"all calls of the burst must return one id, and returned {len(ids)}")
    return len(replies), sum(deduplicated for _, deduplicated in replies)


def caller(barrier: Barrier, answers: Any) -> None:
    """One process of the burst."""
    from shop import hello, rebuild_index

    hello.delay()

    def call() -> None:
        barrier.wait(PATIENCE_S)
        for number in range(CALLS_PER_THREAD):
            # By position, by name, with a default given: the same work.
            args, kwargs = ((7,), {}) if number % 2 else ((), {"full": False, "shop_id": 7})
            result = rebuild_index.delay(*args, **kwargs)
            answers.put((result.id, result.deduplicated))

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def different_arguments() -> tuple[int, int]:
    from shop import rebuild_index

    results = [rebuild_index.delay(shop_id) for shop_id in range(100, 105)]
    for result in results:
        wait_for(result)
    return len(results), sum(result.deduplicated for result in results)


def rejected() -> tuple[int, int]:
    from shop import charge

    from celery_unique import DuplicateTask

    with at_work():
        first = charge.delay(order_id=42)
        try:
            charge.delay(order_id=42)
        except DuplicateTask as duplicate:
            say(f"charge, called again, raises DuplicateTask: {duplicate}")
            check(duplicate.task_id == first.id, "the rejection must name the first call's task")
        else:
            raise DemoFailed("the second call of charge was not rejected")
    wait_for(first)
    return 2, 1


def window() -> tuple[int, int]:
    from shop import send_digest

    from celery_unique import lookup

    first = send_digest.delay(user_id=7)
    wait_for(first)
    inside = send_digest.delay(user_id=7)
    say(f"send_digest has ended ({first.state}); called again inside the window: {inside.outcome}")
    check(inside.id == first.id, "a call inside the window must return the first call's id")
    eventually(lambda: lookup(send_digest, kwargs={"user_id": 7}) is None, "the window never ended")
    after = send_digest.delay(user_id=7)
    say(f"send_digest, called after the window: {after.outcome}")
    wait_for(after)
    return 3, sum(result.deduplicated for result in (first, inside, after))


def failure() -> tuple[int, int]:
    from shop import import_feed

    first = import_feed.delay(feed_id=1)
    wait_for(first)
    again = import_feed.delay(feed_id=1)
    wait_for(again)
    say(f"import_feed ended as {first.state}; called again: {again.outcome}")
    check(first.state == "FAILURE", f"import_feed must fail, and ended as {first.state}")
    return 2, sum(result.deduplicated for result in (first, again))


@contextmanager
def at_work() -> Iterator[None]:
    """Keep tasks that start meanwhile running until this block ends."""
    import shop

    shop.ENOUGH.unlink(missing_ok=True)
    try:
        yield
    finally:
        shop.ENOUGH.touch()


# -- Counting --------------------------------------------------------------------------------------


def play(scene: Scene) -> Figures:
    """Play one scene, and count what it left in the files."""
    import shop

    before = lines(shop.PUBLISHED), lines(shop.RUNS)
    calls, duplicates = scene.play()
    eventually(
        lambda: lines(shop.RUNS) - before[1] >= scene.expected.runs,
        f"not every task ran: {scene.title}",
    )
    messages = shop.PUBLISHED.read_text().splitlines()[before[0] :]
    published = set(messages)
    if len(messages) > len(published):
        # A call that cannot verify that the first one was published sends a copy.
        copies = len(messages) - len(published)
        say(f"{copies} copies of the same message were sent; the worker drops those that have run")
    return Figures(calls, len(published), lines(shop.RUNS) - before[1], duplicates)


def check_nothing_more_ran(rows: list[tuple[Scene, Figures]]) -> None:
    """A second run of a body would have happened during the later scenes."""
    import shop

    eventually(
        lambda: not list(shop.MESSAGES.glob("*.msg")),
        "there are messages that the worker has not received",
    )
    counted, ran = sum(figures.runs for _, figures in rows), lines(shop.RUNS)
    check(ran == counted, f"{ran - counted} more bodies ran after their scene had ended")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(result: Any) -> None:
    eventually(result.ready, f"task {result.id} did not end in {PATIENCE_S} seconds")


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise DemoFailed(otherwise)
        time.sleep(0.02)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)


# -- Output ----------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(textwrap.fill(text, 98, initial_indent="- ", subsequent_indent="  "), flush=True)


def report(rows: list[tuple[Scene, Figures]], seconds: float) -> int:
    """Print the table, and return the exit code."""
    width = max(len(scene.title) for scene, _ in rows)
    heads = ("calls", "published", "runs", "duplicates")
    print(f"\n{'scene':<{width}}  {'  '.join(heads)}")
    print(f"{'-' * width}  {'  '.join('-' * len(head) for head in heads)}")
    for scene, figures in rows:
        cells = (f"{figure:>{len(head)}}" for figure, head in zip(figures, heads, strict=True))
        print(f"{scene.title:<{width}}  {'  '.join(cells)}")
    wrong = [(scene, figures) for scene, figures in rows if figures != scene.expected]
    for scene, figures in wrong:
        print(f"\nWrong: {scene.title}\n  actual    {figures}\n  expected  {scene.expected}")
    print(
        "\nSome figures are wrong."
        if wrong
        else f"\nAll figures are as expected, in {seconds:.1f} s."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
