"""What each act costs the Redis server: processor time, commands and bytes on the wire.

The server is the broker, the result backend and the lock store of a contender, as it is by default.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import redis

from benchmarks.contenders import OURS, PLAIN, TASK, Contender
from benchmarks.measuring import Samples, median, progress, ratio_of_rounds, shuffled
from benchmarks.running import READY_S, until_ready
from benchmarks.servers import Server, server, workers
from benchmarks.stage import FLOOR, FLOOR_DB, Stage, forget_messages, store_of

#: Commands of a connection that is being opened, and those that only a script's first use needs.
OPENING = frozenset({"HELLO", "AUTH", "SELECT", "CLIENT", "ECHO", "SCRIPT", "FUNCTION", "INFO"})
#: As INFO names them: what scripts do is part of the command that called them.
SCRIPTS = ("evalsha", "eval", "fcall")
#: Acts between two readings of the server's counters.
TOGETHER = 25

NEW, DUPLICATE, LIFE = "new call", "duplicate call", "whole life"

#: The least that lock and message in one act can cost: neither the time nor what is stored is read,
#: and no receipt is written.
LEAST = "push and lock alone"
LEAST_SCRIPT = """
redis.call("LPUSH", KEYS[2], ARGV[1])
redis.call("HSET", KEYS[1], "n", ARGV[2], "t:" .. ARGV[3], ARGV[4])
redis.call("PEXPIREAT", KEYS[1], ARGV[5])
return 1
"""


def run(stage: Stage) -> dict[str, Any]:
    """New calls, duplicates and whole lives of ours and of plain Celery on one server, in turns
    with a bare ``SET NX``. A whole life is a call, its task in a worker, and reading its result."""
    with server() as own:
        stage = replace(stage, redis=own, all={n: stage.all[n] for n in (PLAIN, OURS)})
        stage = replace(stage, all=stage.made_anew())
        try:
            return _measured(stage)
        finally:
            for one in stage.all.values():
                one.app.close()


def _measured(stage: Stage) -> dict[str, Any]:
    ours, plain = stage.ours, stage.all[PLAIN]
    progress("Redis, new calls and duplicates")
    held, floor = next(stage.numbers), stage.floor()
    ours.call(held)
    calls = {
        FLOOR: floor,
        LEAST: _least(stage),
        f"{NEW}, {PLAIN}": _new(stage, plain),
        f"{NEW}, {OURS}": _new(stage, ours),
        f"{DUPLICATE}, {OURS}": lambda _: ours.call(held),
    }
    rounds = _rounds(stage, calls)
    commands = {name: _commands(stage.redis, act) for name, act in calls.items()}
    for one in (ours, plain):
        forget_messages(one, stage.redis)
    progress("Redis, whole lives")
    with workers([PLAIN, OURS], stage.redis.url()) as running:
        for one in (plain, ours):
            until_ready(stage, one, running)
        lives = {
            f"{LIFE}, {PLAIN}": _life(stage, plain),
            f"{LIFE}, {OURS}": _life(stage, ours),
        }
        rounds |= _rounds(stage, lives)
        commands |= {name: _commands(stage.redis, act) for name, act in lives.items()}
    return _figures(rounds, commands)


def beyond_plain(server_figures: dict[str, Any], act: str, field: str) -> float:
    """What ours takes in addition to plain Celery. A plain duplicate is no act of Celery."""
    ours = server_figures[f"{act}, {OURS}"][field]
    return float(ours - server_figures.get(f"{act}, {PLAIN}", {}).get(field, 0.0))


def _least(stage: Stage) -> Callable[[int], Any]:
    """With a message as long as ours, names and a value as long as those of a lock."""
    queue = stage.ours.app.conf.task_default_queue
    stage.ours.call(next(stage.numbers))
    with redis.Redis.from_url(stage.redis.url(stage.ours.database)) as ours:
        message = ours.lindex(queue, 0)
    client = redis.Redis.from_url(stage.redis.url(FLOOR_DB))
    sha = client.script_load(LEAST_SCRIPT)
    expires_at = int(time.time() * 1000) + 86_400_000

    def push_and_lock(number: int) -> Any:
        lock = f"cu:{{{number % 64}}}:1:{next(stage.numbers):064x}"
        values = (message, TASK, str(uuid.uuid4()), f'[1,"w",{expires_at},86400000]', expires_at)
        return client.evalsha(sha, 2, lock, queue, *values)

    return push_and_lock


def _new(stage: Stage, one: Contender) -> Callable[[int], Any]:
    return lambda _: one.call(next(stage.numbers))


def _life(stage: Stage, one: Contender) -> Callable[[int], Any]:
    return lambda _: one.call(next(stage.numbers)).get(timeout=READY_S)


def _rounds(stage: Stage, acts: dict[str, Callable[[int], Any]]) -> dict[str, Samples]:
    """For each act the counters of the server, per act, one figure of each round."""
    set_nx = stage.floor()
    found: dict[str, Samples] = {name: {} for name in acts}
    for number, order in enumerate(shuffled(stage.sizes.server_rounds + 1, list(acts))):
        for name in order:
            act = acts[name]
            alone = _counted(stage, act)
            # A SET NX that follows another is several times as fast as one after other commands.
            beside = _counted(stage, lambda n, act=act: (act(n), set_nx(n)))
            for field in ("script_us", "set_us"):
                alone[field] = beside[field]
            if number:  # the first round connects, and has the server cache the scripts
                for field, value in alone.items():
                    found[name].setdefault(field, []).append(value)
    return found


def _counted(stage: Stage, act: Callable[[int], Any]) -> dict[str, float]:
    flush = store_of(stage.ours).flush
    flush()
    before = _counters(stage.redis)
    kept = [act(number) for number in range(TOGETHER)]
    flush()
    after = _counters(stage.redis)
    del kept
    return {field: (after[field] - before[field]) / TOGETHER for field in before}


def _counters(own: Server) -> dict[str, float]:
    stats, cpu = own.client.info("stats"), own.client.info("cpu")
    commands = own.client.info("commandstats")

    def spent(*names: str) -> float:
        return float(sum(commands.get(f"cmdstat_{name}", {}).get("usec", 0) for name in names))

    return {
        "script_us": spent(*SCRIPTS),
        "set_us": spent("set"),
        "server_cpu_us": 1e6 * (float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])),
        "bytes_in": float(stats["total_net_input_bytes"]),
        "bytes_out": float(stats["total_net_output_bytes"]),
    }


def _commands(own: Server, act: Callable[[int], Any]) -> float:
    """Commands that clients send for one act, without those inside scripts: the median of some,
    since a worker also has commands that belong to no task."""
    seen: list[list[str]] = [[]]
    listening, mark = threading.Event(), f"next {uuid.uuid4()}"

    def listen() -> None:
        with own.client.monitor() as monitor:
            listening.set()
            for line in monitor.listen():
                if mark in line["command"]:
                    if len(seen) > TOGETHER:
                        return
                    seen.append([])
                elif line["client_type"] != "lua":
                    seen[-1].append(line["command"].split(" ", 1)[0].upper())

    act(0)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    listening.wait(10)
    for number in range(TOGETHER + 1):
        own.client.echo(mark)
        act(number)
    own.client.echo(mark)
    thread.join(10)
    return median([sum(name not in OPENING for name in names) for names in seen[2:]])


def _figures(rounds: dict[str, Samples], commands: dict[str, float]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, samples in rounds.items():
        figures[name] = {field: round(median(values), 2) for field, values in samples.items()}
        figures[name]["commands"] = commands[name]
        if name.endswith(OURS) or name == LEAST:
            compared = ratio_of_rounds(samples["script_us"], samples["set_us"])
            figures[name]["times_set_nx"] = compared.as_json()
    return figures
