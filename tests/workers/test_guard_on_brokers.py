"""Late acknowledged tasks that last longer than the broker waits: guarded, each runs once.

CELERY_UNIQUE_GUARDED says how many: ``make test-guard`` makes 1,000 calls of 4 s, and 50 kills.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support import RedisServer, eventually
from tests.support.process import LocalProcess
from tests.support.redis_journal import JOURNAL_ARGS, RedisJournal
from tests.support.server import free_port
from tests.workers.apps.faults import redis_broker_options
from tests.workers.apps.redelivered import MODES, sqs_url
from tests.workers.redelivery import HEAD, Figures, Redelivery, every, play

CALLS = int(os.environ.get("CELERY_UNIQUE_GUARDED", "24"))
WHOLE = CALLS >= 1000
#: How long a task takes, and after which time Redis and SQS deliver its message again.
TASK_S = 4.0
VISIBLE_AFTER_S = 2
KILLS = 50 if WHOLE else 3
CUTS = 20 if WHOLE else 2
WORKERS = 4 if WHOLE else 2
CONCURRENCY = 50 if WHOLE else 12
RUN_LEASE_S = 10.0
#: Many times what a machine with two cores needs.
PATIENCE_S = 120 + CALLS * 0.6
#: A copy that is left comes within this time: it is visible after two seconds, and one that is held
#: back comes to the gate each second. The whole size makes more work for the machine.
QUIET_S = 8.0 if WHOLE else 5.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S)]
#: What happens without the guard is shown by the whole size, and on one broker by make test.
COMPARED = MODES if WHOLE else ("guarded",)


def stage(directory: Path, broker: str, redis_url: str, mode: str, **options: Any) -> Redelivery:
    settings = {"broker": broker, "redis_url": redis_url, "mode": mode, "seconds": TASK_S}
    settings["run_lease_s"] = RUN_LEASE_S
    if options:
        settings["transport_options"] = options
    return Redelivery(directory, settings, WORKERS, CONCURRENCY)


def check(figures: Figures, mode: str) -> None:
    if mode != "guarded":
        assert figures.overlaps, "the broker delivers no message twice: nothing is shown"
        return
    assert figures.overlaps == 0
    assert figures.dropped
    # A message whose process is killed between kombu's pop of the list and its record is lost with
    # any worker. Nothing else is.
    assert figures.unexplained == []
    assert figures.lost == figures.swallowed
    if not figures.kills + figures.ends:
        assert (figures.runs, figures.more_than_once) == (CALLS, 0)


def play_with_kills(played: Redelivery) -> Figures:
    """Each kill finds tasks: some calls are made after it."""
    step = CALLS // (2 * KILLS)
    later = iter(range(CALLS - KILLS * step, CALLS))

    def kill_and_call() -> bool:
        killed = played.kill_one()
        played.call(islice(later, step if killed else 0))
        return killed

    figures = play(
        played,
        CALLS,
        timeout=PATIENCE_S,
        quiet_s=QUIET_S,
        meanwhile=every(0.3, kill_and_call, KILLS),
        first=CALLS - KILLS * step,
    )
    assert figures.kills == KILLS
    for words in played.last_words:
        print(f"a worker has ended by itself:\n{words}")
    return figures


@pytest.mark.parametrize("mode", MODES if WHOLE else ("plain", "guarded"))
def test_redis(redis_server, tmp_path, report, mode):
    url = redis_server.fresh_url()
    played = stage(tmp_path, url, url, mode, **redis_broker_options(VISIBLE_AFTER_S))

    figures = play(played, CALLS, timeout=PATIENCE_S, quiet_s=QUIET_S)

    report(f"{HEAD}\n{figures.row('Redis', 'none', mode)}")
    check(figures, mode)


@pytest.mark.parametrize("mode", COMPARED)
def test_redis_with_kills(start_server, tmp_path, report, mode):
    server = start_server(RedisServer, append_only=True, extra_args=JOURNAL_ARGS)
    played = stage(tmp_path, server.url, server.url, mode, **redis_broker_options(VISIBLE_AFTER_S))
    played.journal = RedisJournal(server, 0, "work", "ends:")

    figures = play_with_kills(played)

    report(f"{HEAD}\n{figures.row('Redis', f'{figures.kills} kills', mode)}")
    report(f"lost with a killed process before kombu recorded the message: {figures.swallowed}")
    check(figures, mode)


@pytest.mark.parametrize("mode", ["plain", "guarded"])
def test_redis_loses_a_message_whose_worker_dies_between_kombus_pop_and_its_record(
    start_server, tmp_path, mode
):
    """Whatever the task: neither the worker nor the library has seen the message."""
    server = start_server(RedisServer, append_only=True, extra_args=JOURNAL_ARGS)
    played = stage(tmp_path, server.url, server.url, mode, **redis_broker_options(VISIBLE_AFTER_S))
    played.settings["dies_before_record"] = True
    worker = played.start("dying")

    played.call([0])

    try:
        eventually(lambda: not worker.is_running(), timeout=30)
    finally:
        worker.kill()
        played.caller.close()
    life = RedisJournal(server, 0, "work", "ends:").messages()["0"]
    assert life.events == ["pushed", "popped"]
    assert life.is_swallowed
    with server.client() as client:
        assert (client.llen("work"), client.hlen("unacked"), client.zcard("unacked_index")) == (
            (0, 0, 0)
        )


@pytest.mark.parametrize("mode", COMPARED)
def test_rabbitmq_with_cuts(rabbitmq_server, redis_server, start_proxy, tmp_path, report, mode):
    url, proxy = rabbitmq_server.fresh_url(), start_proxy(rabbitmq_server.port)
    played = stage(tmp_path, proxy.url_of(url), redis_server.fresh_url(), mode)
    cuts = []

    def cut() -> None:
        cuts.append(1)
        proxy.cut()
        proxy.restore()

    cutting = every(3.0 if WHOLE else 1.5, cut, CUTS)
    figures = play(played, CALLS, timeout=PATIENCE_S, quiet_s=QUIET_S, meanwhile=cutting)

    report(f"{HEAD}\n{figures.row('RabbitMQ', f'{len(cuts)} cuts', mode)}")
    assert cuts
    check(figures, mode)


@pytest.mark.parametrize("mode", COMPARED)
def test_rabbitmq_with_kills(rabbitmq_server, redis_server, tmp_path, report, mode):
    played = stage(tmp_path, rabbitmq_server.fresh_url(), redis_server.fresh_url(), mode)

    figures = play_with_kills(played)

    report(f"{HEAD}\n{figures.row('RabbitMQ', f'{figures.kills} kills', mode)}")
    assert figures.lost == 0
    if mode == "guarded":
        assert figures.overlaps == 0


#: The broker looks once in a tick whether a message is held for longer than the time-out.
_SHORTEST = (
    "application:set_env(rabbit, consumer_timeout, 1000),"
    "application:set_env(rabbit, channel_tick_interval, 1000)."
)
_USUAL = (
    "application:set_env(rabbit, consumer_timeout, 1800000),"
    "application:set_env(rabbit, channel_tick_interval, 60000)."
)


@pytest.mark.parametrize("mode", COMPARED)
def test_rabbitmq_with_consumer_timeouts(rabbitmq_server, redis_server, tmp_path, report, mode):
    """It closes the channel of a worker that holds a message for longer. Celery cannot recover
    from that: the worker ends, and is started again."""
    played = stage(tmp_path, rabbitmq_server.fresh_url(), redis_server.fresh_url(), mode)
    rabbitmq_server.control("eval", _SHORTEST)
    try:
        figures = play(played, CALLS, timeout=PATIENCE_S, quiet_s=QUIET_S, meanwhile=played.revive)
    finally:
        rabbitmq_server.control("eval", _USUAL)

    report(f"{HEAD}\n{figures.row('RabbitMQ', f'consumer time-out, {figures.ends} ends', mode)}")
    if mode == "guarded":
        check(figures, mode)
    elif mode == "plain":
        # No overlaps: a worker whose channel is closed ends its tasks before it ends itself. All of
        # its messages come back, and run again before any that has not run yet.
        assert figures.more_than_once


@pytest.fixture
def sqs(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty SQS: moto's server."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = LocalProcess(command, log_path=tmp_path / "moto.txt")
    server.start()
    try:
        eventually(lambda: _answers(port), timeout=60, ignoring=OSError, message=server.log_tail())
        yield sqs_url(port)
    finally:
        server.kill()


def _answers(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5) as reply:
        return bool(reply.status == 200)


SQS_OPTIONS = {
    "region": "eu-west-1",
    "is_secure": False,
    "visibility_timeout": VISIBLE_AFTER_S,
    "wait_time_seconds": 1,
    "polling_interval": 0.1,
}


@pytest.mark.parametrize("mode", COMPARED)
def test_sqs(sqs, redis_server, tmp_path, report, mode):
    played = stage(tmp_path, sqs, redis_server.fresh_url(), mode, **SQS_OPTIONS)

    figures = play(played, CALLS, timeout=PATIENCE_S, quiet_s=QUIET_S)

    report(f"{HEAD}\n{figures.row('SQS', 'none', mode)}")
    check(figures, mode)


@pytest.mark.parametrize("mode", COMPARED)
def test_sqs_with_kills(sqs, redis_server, tmp_path, report, mode):
    played = stage(tmp_path, sqs, redis_server.fresh_url(), mode, **SQS_OPTIONS)

    figures = play_with_kills(played)

    report(f"{HEAD}\n{figures.row('SQS', f'{figures.kills} kills', mode)}")
    assert figures.lost == 0
    if mode == "guarded":
        assert figures.overlaps == 0
