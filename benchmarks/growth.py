"""The same figures on Redis servers that hold none, thousands and a million locks, side by side.

What is measured here is measured on SQL stores too: see ``growth_sql``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import redis

import celery_unique
from benchmarks import contenders
from benchmarks.contenders import OURS, TASK, Contender
from benchmarks.measuring import Act, interleaved, median, progress, ratio_of_rounds
from benchmarks.servers import Server, server
from benchmarks.stage import Stage, store_of
from benchmarks.storage import GRACE_MS, QUEUE_MS, RUN_MS, STATES
from celery_unique.keys import key_of
from celery_unique.stores.base import Claim, Finish, Held, Start
from celery_unique.stores.record import State

#: Writes copies of one real lock under keys that no call has.
FILL = """
local value, expires = ARGV[1], ARGV[2]
for n = tonumber(ARGV[3]), tonumber(ARGV[4]) do
  local digest = redis.sha1hex(n) .. redis.sha1hex(-n):sub(1, 24)
  local name = "cu:{" .. tonumber(digest:sub(1, 2), 16) % 64 .. "}:1:" .. digest
  local id = digest:sub(1, 8) .. "-0000-4000-8000-" .. digest:sub(9, 20)
  redis.call("HSET", name, "t:" .. id, value, "n", ARGV[5])
  redis.call("PEXPIREAT", name, expires)
end
"""
CHUNK = 20_000


@dataclass(frozen=True)
class Filled:
    """A store that holds so many locks, and an app that uses it."""

    locks: int
    one: Contender
    store: Any
    #: What acts leave to a thread or to the server is done before the next ones are timed.
    after_act: Callable[[], Any] = lambda: None
    before_round: Callable[[], Any] = lambda: None


Kinds = Mapping[str, Callable[[Stage, Filled], Act]]


def run(stage: Stage) -> dict[str, Any]:
    with ExitStack() as stack:
        filled = [_filled(stage, stack, count) for count in stage.sizes.growth]
        return {"locks": list(stage.sizes.growth), "figures": figures(stage, filled, KINDS)}


def figures(stage: Stage, filled: Sequence[Filled], kinds: Kinds) -> dict[str, Any]:
    """Each kind of act on all of these stores in turns; the first of them holds no locks."""
    told = {}
    for kind, make in kinds.items():
        progress(f"{kind}, as locks grow")
        told[kind] = _grown(stage, filled, {str(one.locks): make(stage, one) for one in filled})
        stage.forget_messages()
    return told


def _grown(stage: Stage, filled: Sequence[Filled], acts: Mapping[str, Act]) -> dict[str, Any]:
    def between() -> None:
        for one in filled:
            one.after_act()

    rounds: dict[str, list[float]] = {name: [] for name in acts}
    interleaved(1, acts, between=between)
    for _ in range(stage.sizes.growth_rounds):
        for one in filled:
            one.before_round()
        samples = interleaved(stage.sizes.growth_calls, acts, warm_up=0, between=between)
        for name, times in samples.items():
            rounds[name].append(median(times))
    none = next(iter(rounds.values()))
    return {
        name: {
            "median_us": round(median(times), 2),
            **ratio_of_rounds(times, none).as_json(),
            "rounds": len(times),
        }
        for name, times in rounds.items()
    }


def _filled(stage: Stage, stack: ExitStack, count: int) -> Filled:
    own = stack.enter_context(server())
    one = contenders.make(OURS, stage.broker.url(), own.url())
    store = store_of(one)
    stack.callback(store.close)
    if count:
        progress(f"a server with {count:,} locks")
        _fill(own, one, store, count)
    return Filled(count, one, store)


def _fill(own: Server, one: Contender, store: Any, count: int) -> None:
    key, task_id = key_of("the one that is copied"), str(uuid.uuid4())
    store.acquire(key, Claim(task_id, TASK, STATES, GRACE_MS))
    store.confirm(key, task_id, QUEUE_MS)
    store.flush()
    with redis.Redis.from_url(own.url(one.lock_db)) as client:
        name = store._layout.name_of(key)
        value = client.hget(name, f"t:{task_id}")
        seconds, microseconds = client.time()
        expires = seconds * 1000 + microseconds // 1000 + client.pttl(name)
        script = client.register_script(FILL)
        for first in range(1, count + 1, CHUNK):
            script(args=[value, expires, first, min(first + CHUNK - 1, count), TASK])
        client.delete(name)
        if client.dbsize() != count:
            raise RuntimeError(f"{client.dbsize()} locks where {count} were to be")


# -- what is measured -----------------------------------------------------------------------


def _new_call(stage: Stage, filled: Filled) -> Act:
    return lambda _: filled.one.call(next(stage.numbers))


def _duplicate_call(stage: Stage, filled: Filled) -> Act:
    held = next(stage.numbers)
    filled.one.call(held)
    filled.store.flush()
    return lambda _: filled.one.call(held)


def _start_and_finish(stage: Stage, filled: Filled) -> Act:
    store = filled.store

    def act(_: int) -> None:
        task_id, delivery = str(uuid.uuid4()), f"celery@bench/1/0/{next(stage.numbers)}"
        key = key_of(task_id)
        store.start(key, Start(task_id, delivery, TASK, RUN_MS, RUN_MS, QUEUE_MS))
        store.finish(key, Finish(task_id, delivery, State.COMPLETED, QUEUE_MS, QUEUE_MS))

    return act


def _renewal(stage: Stage, filled: Filled) -> Act:
    task_id, delivery = str(uuid.uuid4()), "celery@bench/1/0/renewed"
    key = key_of(task_id)
    filled.store.start(key, Start(task_id, delivery, TASK, QUEUE_MS, QUEUE_MS, QUEUE_MS))
    held = [Held(key, task_id, delivery, RUN_MS, RUN_MS)]
    return lambda _: filled.store.renew(held)


def _lookup(stage: Stage, filled: Filled) -> Act:
    held = next(stage.numbers)
    filled.one.call(held)
    filled.store.flush()
    call = (held, True), {"tag": "nightly"}
    return lambda _: celery_unique.lookup(filled.one.task, *call, app=filled.one.app)


KINDS: Kinds = {
    "new call": _new_call,
    "duplicate call": _duplicate_call,
    "start and finish": _start_and_finish,
    "renewal of one lock": _renewal,
    "lookup": _lookup,
}
