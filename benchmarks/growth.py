"""The same figures on Redis servers that hold none, thousands and a million locks, side by side.

What is measured here is measured on SQL stores too: see ``growth_sql``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import redis

import celery_unique
from benchmarks import contenders
from benchmarks.contenders import OURS, TASK, Contender
from benchmarks.measuring import Act, interleaved, median, progress, ratio_of_rounds
from benchmarks.running import READY_S, until_ready
from benchmarks.servers import Server, server, workers
from benchmarks.sizes import Sizes
from benchmarks.stage import Stage, forget_messages, store_of
from benchmarks.storage import GRACE_MS, QUEUE_MS, RUN_MS, STATES
from celery_unique.keys.digest import key_of
from celery_unique.stores.base import Claim, Finish, Held, Start
from celery_unique.stores.record import State

#: Writes copies of two real locks under keys that no call has: of a hundred locks one is followed
#: by another call, and the others are alone. KEYS are none: the names are made here.
FILL = """
local first, last, task, expires = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local alone, followed, following, follower = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
for n = first, last do
  local digest = redis.sha1hex(n) .. redis.sha1hex(-n):sub(1, 24)
  local bucket = "cu:{" .. tonumber(digest:sub(1, 2), 16) % 64 .. "}"
  local name = bucket .. ":1:" .. digest
  local id = digest:sub(1, 8) .. "-0000-4000-8000-" .. digest:sub(9, 20)
  if n % 100 == 2 then
    local members = bucket .. "f:1:" .. digest
    redis.call("HSET", name, "t:" .. id, followed, "n", task, "f", (following:gsub("HOLDER", id)))
    redis.call("HSET", members, "follower-" .. id, follower)
    redis.call("ZADD", bucket .. "due", expires + n, name)
    redis.call("PEXPIREAT", members, expires)
  else
    redis.call("HSET", name, "t:" .. id, alone, "n", task)
  end
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
    #: Where its messages are. The locks are there too, unless ``url`` is that of another store.
    broker: Server
    url: str = ""
    #: What acts leave to a thread or to the server is done before the next ones are timed.
    after_act: Callable[[], Any] = lambda: None
    before_round: Callable[[], Any] = lambda: None
    #: Ends with the kind that is being measured: workers would be in the way of the next one.
    meanwhile: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True)
class Kind:
    """An act that is timed. Of one that does many things at once it is the time of each."""

    make: Callable[[Stage, Filled], Act]
    calls: Callable[[Sizes], int] = lambda sizes: sizes.growth_calls  # in a round
    together: Callable[[Sizes], int] | None = None


Kinds = Mapping[str, Kind]


def run(stage: Stage) -> dict[str, Any]:
    with ExitStack() as stack:
        filled = [_filled(stage, stack, count) for count in stage.sizes.growth]
        return {
            "locks": list(stage.sizes.growth),
            "together": together(stage.sizes, KINDS),
            "figures": figures(stage, filled, KINDS),
        }


def together(sizes: Sizes, kinds: Kinds) -> dict[str, int]:
    """How many things an act does at once, of the kinds that do more than one."""
    return {name: kind.together(sizes) for name, kind in kinds.items() if kind.together}


def figures(stage: Stage, filled: Sequence[Filled], kinds: Kinds) -> dict[str, Any]:
    """Each kind of act on all of these stores in turns; the first of them holds no locks."""
    found = {}
    for name, kind in kinds.items():
        progress(f"{name}, as locks grow")
        try:
            acts = {str(one.locks): kind.make(stage, one) for one in filled}
            found[name] = _grown(stage, filled, kind, acts)
        finally:
            for one in filled:
                one.meanwhile.close()
                forget_messages(one.one, one.broker)
    return found


def _grown(
    stage: Stage, filled: Sequence[Filled], kind: Kind, acts: Mapping[str, Act]
) -> dict[str, Any]:
    def between() -> None:
        for one in filled:
            one.after_act()

    at_once = kind.together(stage.sizes) if kind.together else 1
    rounds: dict[str, list[float]] = {name: [] for name in acts}
    interleaved(1, acts, warm_up=0 if kind.together else 3, between=between)
    for _ in range(stage.sizes.growth_rounds):
        for one in filled:
            one.before_round()
        calls = kind.calls(stage.sizes)
        samples = interleaved(calls, acts, warm_up=0, between=between)
        for name, times in samples.items():
            rounds[name].append(median(times) / at_once)
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
    one = contenders.make(OURS, own.url())
    store = store_of(one)
    stack.callback(store.close)
    if count:
        progress(f"a server with {count:,} locks")
        _fill(own, one, store, count)
    return Filled(count, one, store, own)


def _fill(own: Server, one: Contender, store: Any, count: int) -> None:
    with redis.Redis.from_url(own.url(one.database)) as client:
        copied = _copied(client, store)
        script = client.register_script(FILL)
        for first in range(1, count + 1, CHUNK):
            script(args=[first, min(first + CHUNK - 1, count), TASK, *copied])
        followed = sum(client.zcard(name) for name in store._layout.due_sets())
        # Beside the locks: who follows them, and a set for each bucket.
        names = client.dbsize() - followed - len(client.keys("cu:{*}due"))
        if (names, followed) != (count, (count + 98) // 100):
            raise RuntimeError(f"{names} locks, {followed} followed, where {count} were to be")


def _copied(client: Any, store: Any) -> list[Any]:
    """When they lapse, and what the fields of two real locks hold, one of them followed."""
    (alone, alone_id), (followed, followed_id) = (_real(store, name) for name in ("one", "other"))
    # A message of a usual size.
    store.acquire(followed, Claim(str(uuid.uuid4()), TASK, STATES, GRACE_MS, join="x" * 600))
    record, members, *_ = store._layout.names_of(followed)
    values = [
        client.hget(store._layout.name_of(alone), f"t:{alone_id}"),
        client.hget(record, f"t:{followed_id}"),
        client.hget(record, "f").replace(followed_id.encode(), b"HOLDER"),
        *client.hvals(members),
    ]
    seconds, microseconds = client.time()
    expires = seconds * 1000 + microseconds // 1000 + QUEUE_MS
    client.flushdb()
    return [expires, *values]


def _real(store: Any, name: str) -> tuple[str, str]:
    key, task_id = key_of(f"the {name} that is copied"), str(uuid.uuid4())
    store.acquire(key, Claim(task_id, TASK, STATES, GRACE_MS))
    store.confirm(key, task_id, QUEUE_MS)
    store.flush()
    return key, task_id


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


def _many_calls(stage: Stage, filled: Filled) -> Act:
    def act(_: int) -> Any:
        numbers = [next(stage.numbers) for _ in range(stage.sizes.growth_many)]
        return celery_unique.apply_many(
            [filled.one.task.s(number, True, tag="nightly") for number in numbers]
        )

    return act


def _renewal_of_many(stage: Stage, filled: Filled) -> Act:
    held = []
    for number in range(stage.sizes.growth_held):
        task_id, delivery = str(uuid.uuid4()), f"celery@bench/1/0/{number}"
        key = key_of(task_id)
        filled.store.start(key, Start(task_id, delivery, TASK, QUEUE_MS, QUEUE_MS, QUEUE_MS))
        held.append(Held(key, task_id, delivery, RUN_MS, RUN_MS))

    def act(_: int) -> None:
        if not all(filled.store.renew(held)):
            raise RuntimeError("a lock that is held was not renewed")

    return act


def _due(stage: Stage, filled: Filled) -> Act:
    return lambda _: filled.store.due()


def _call_to_result(stage: Stage, filled: Filled) -> Act:
    """With a worker of its own, and where the locks are elsewhere with a broker of its own: those
    of one broker would share its queue."""
    own = filled.meanwhile.enter_context(server()) if filled.url else filled.broker
    broker = own.url()
    running = filled.meanwhile.enter_context(workers([OURS], broker, filled.url))
    # An app of its own: Celery keeps a subscription for every result of the kinds before.
    one = contenders.make(OURS, broker, filled.url)
    filled.meanwhile.callback(one.app.close)
    filled.meanwhile.callback(store_of(one).close)
    until_ready(stage, one, running)
    return lambda _: one.call(next(stage.numbers)).get(timeout=READY_S)


KINDS: Kinds = {
    "new call": Kind(_new_call),
    "duplicate call": Kind(_duplicate_call),
    "call in apply_many": Kind(
        _many_calls, lambda sizes: sizes.growth_batches, lambda sizes: sizes.growth_many
    ),
    "start and finish": Kind(_start_and_finish),
    "call to result": Kind(_call_to_result, lambda sizes: sizes.growth_results),
    "renewal of one lock": Kind(_renewal),
    "renewal in a batch": Kind(
        _renewal_of_many, lambda sizes: sizes.growth_batches, lambda sizes: sizes.growth_held
    ),
    "search for followers that are due": Kind(_due),
    "lookup": Kind(_lookup),
}
