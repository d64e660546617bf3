"""Who takes part, and what may go wrong: each scenario is explored to its end."""

from __future__ import annotations

from .world import (
    EVERY_STATE,
    UNTIL_PUBLISHED,
    UNTIL_START,
    UNTIL_SUCCESS,
    WHILE_WAITING,
    Call,
    Scenario,
)


def faults(**numbers: int) -> tuple[tuple[str, int], ...]:
    """``faults(worker_dies=1)``; see ``world.Fault``."""
    numbers = {name.replace("fail_over", "fail-over"): n for name, n in numbers.items()}
    return tuple((name.replace("_", " "), n) for name, n in numbers.items())


ONE = Call()
ATOMIC = Call(way="atomic")
REPLACE = Call("replace")
RERUN = Call("rerun")
JOINS = Call(joins=True)
GUARDED = Call(way="guard")
CANVAS = Call(canvas=True)
QUEUE = Call("queue")
QUEUE_ATOMIC = Call("queue", "atomic")
TWO = Call("queue", "atomic", limit=2)
MERGE = Call("merge")
MERGE_ATOMIC = Call("merge", "atomic")

SCENARIOS: dict[str, Scenario] = {
    # -- a new call and its duplicate
    "one call": Scenario((ONE,), faults(worker_dies=1, caller_dies=1, publish_fails=1)),
    "one call, late": Scenario((ONE,), faults(worker_dies=2, redelivery=1), late=True),
    "two calls": Scenario((ONE, ONE)),
    "two calls, a caller dies": Scenario((ONE, ONE), faults(caller_dies=1)),
    "two calls, a publish fails": Scenario((ONE, ONE), faults(publish_fails=1)),
    "two calls, a slow caller": Scenario((ONE, ONE), faults(delay=2), workers=1),
    "two calls, a slow caller dies": Scenario((ONE, ONE), faults(delay=1, caller_dies=1)),
    "two calls, no reply": Scenario((ONE, ONE), faults(no_reply=1)),
    "two calls, published without a reply": Scenario(
        (Call(on_error="publish"), ONE), faults(no_reply=1)
    ),
    "two calls, a worker dies": Scenario((ONE, ONE), faults(worker_dies=1)),
    "two calls, a worker dies, late": Scenario((ONE, ONE), faults(worker_dies=1), late=True),
    "two calls, a worker stops": Scenario((ONE, ONE), faults(worker_stops=1, delay=1)),
    "two calls, a worker stops, late": Scenario(
        (ATOMIC, ATOMIC), faults(worker_stops=1, delay=1), late=True
    ),
    "two calls, redelivered": Scenario((ONE, ONE), faults(redelivery=1), late=True),
    "two calls, the store fails over": Scenario((ONE, ONE), faults(fail_over=1)),
    "two calls, the store fails over, late": Scenario(
        (ONE, ONE), faults(fail_over=1), late=True, workers=1
    ),
    "two calls, released": Scenario((ONE, ONE), faults(release=1)),
    "two calls, revoked": Scenario((ONE, ONE), faults(revoke=1)),
    "two calls, revoked, a worker dies": Scenario(
        (ONE, ONE), faults(revoke=1, worker_dies=1), late=True, workers=1
    ),
    "three calls": Scenario((ONE, ONE, ONE), workers=1),
    "reject": Scenario((ONE, Call("reject")), faults(caller_dies=1)),
    "the body fails": Scenario((Call(fails=True), ONE), faults(worker_dies=1)),
    # -- in one act
    "atomic": Scenario((ATOMIC, ATOMIC), faults(worker_dies=1), one_act=True),
    "atomic, late": Scenario(
        (ATOMIC, ATOMIC), faults(worker_dies=1, redelivery=1), late=True, one_act=True
    ),
    "atomic and two steps": Scenario((ATOMIC, ONE), faults(caller_dies=1, publish_fails=1)),
    "atomic replace": Scenario((ATOMIC, Call("replace", "atomic")), faults(worker_dies=1)),
    "atomic rerun": Scenario((ATOMIC, Call("rerun", "atomic")), faults(worker_dies=1), late=True),
    "atomic, the store fails over": Scenario((ATOMIC, ATOMIC), faults(fail_over=1), one_act=True),
    # -- the result is seen
    "a call after the result": Scenario((ONE, Call(after_result=0))),
    "a call after the result, late": Scenario((ONE, Call(after_result=0)), late=True),
    "a call after the result, redelivered": Scenario(
        (ONE, Call(after_result=0)), faults(redelivery=1), late=True
    ),
    "a call after the result, in one act": Scenario(
        (ATOMIC, Call(way="atomic", after_result=0)), late=True, one_act=True
    ),
    # -- replace
    "replace": Scenario((ONE, REPLACE), faults(publish_fails=1)),
    "replace, a caller dies": Scenario((ONE, REPLACE), faults(caller_dies=1)),
    "replace, a slow caller": Scenario((ONE, REPLACE), faults(delay=2), workers=1),
    "replace, no reply": Scenario((ONE, REPLACE), faults(no_reply=1)),
    "replace, revoked": Scenario((ONE, REPLACE), faults(revoke=1)),
    "replace a helped call": Scenario((ONE, ONE, REPLACE), workers=1),
    "revoke a helped call": Scenario((ONE, ONE), faults(revoke=1), workers=1),
    "replace twice": Scenario((ONE, REPLACE, REPLACE), workers=1),
    "replace twice, a publish fails": Scenario(
        (ATOMIC, REPLACE, REPLACE), faults(publish_fails=1), workers=1
    ),
    "replace twice, a caller dies": Scenario(
        (ATOMIC, REPLACE, REPLACE), faults(caller_dies=1), workers=1
    ),
    "replace a scheduled one": Scenario(
        (Call(delay=2), Call("replace", delay=2)), faults(publish_fails=1, caller_dies=1)
    ),
    "replace, the schedule kept": Scenario(
        (Call(delay=2), Call("replace_except_schedule")), faults(caller_dies=1, delay=1)
    ),
    "debounce": Scenario(
        (Call("replace", delay=1, max_wait=1), Call("replace", delay=1, max_wait=1)),
        faults(delay=2),
    ),
    "replace a retry": Scenario((Call(retries=1), REPLACE), faults(publish_fails=1)),
    # -- ETA
    "scheduled": Scenario((Call(delay=2), ONE), faults(delay=1, worker_dies=1)),
    "scheduled, late": Scenario((Call(delay=2), ONE), faults(worker_dies=1), late=True),
    # -- retry
    "retry": Scenario((Call(retries=1), ONE), faults(worker_dies=1)),
    "retry, late": Scenario((Call(retries=1), ONE), faults(worker_dies=1), late=True, workers=1),
    "retry, redelivered": Scenario(
        (Call(retries=1), ONE), faults(redelivery=1), late=True, workers=2
    ),
    # -- rerun, and a task that calls itself
    "rerun": Scenario((ONE, RERUN)),
    "rerun, a worker dies": Scenario((ONE, RERUN), faults(worker_dies=1)),
    "rerun, a worker dies, late": Scenario((ONE, RERUN), faults(worker_dies=1), late=True),
    "rerun, a publish fails": Scenario((ONE, RERUN), faults(publish_fails=1, caller_dies=1)),
    "rerun twice": Scenario((ONE, RERUN, RERUN)),
    "a long body": Scenario((ATOMIC, ATOMIC), faults(delay=3)),
    "a long body, its successor is held": Scenario(
        (
            ATOMIC,
            Call("rerun", "atomic", in_body_of=0),
            Call(way="atomic", after_result=0),
        ),
        faults(delay=5),
    ),
    "a task calls itself": Scenario((ONE, Call(in_body_of=0)), faults(worker_dies=1)),
    "a task calls itself, late": Scenario((ONE, Call(in_body_of=0)), late=True),
    # -- followers
    "a follower": Scenario((ONE, JOINS), reapers=1),
    "a follower, a worker dies": Scenario((ONE, JOINS), faults(worker_dies=1), reapers=1),
    "a follower, a worker dies, late": Scenario(
        (ONE, JOINS), faults(worker_dies=1), late=True, reapers=1, workers=1
    ),
    "a follower, a worker dies twice": Scenario(
        (ATOMIC, Call(way="atomic", joins=True)), faults(worker_dies=2), reapers=1, one_act=True
    ),
    "a follower, its holder is given back": Scenario(
        (ONE, JOINS), faults(publish_fails=1), reapers=1
    ),
    "a follower, its holder is revoked": Scenario((ONE, JOINS), faults(revoke=1), reapers=1),
    "a follower of what is replaced": Scenario((ONE, JOINS, REPLACE), reapers=1, workers=1),
    "two followers, a worker dies": Scenario(
        (ONE, JOINS, JOINS), faults(worker_dies=1), reapers=1, workers=1
    ),
    "a follower, the reaper dies": Scenario(
        (ONE, JOINS), faults(worker_dies=1, reaper_dies=1), reapers=1
    ),
    "a follower, two reapers": Scenario((ONE, JOINS), faults(worker_dies=1), reapers=2),
    "a follower, two reapers, one is slow": Scenario(
        (ATOMIC, Call(way="atomic", joins=True)),
        faults(worker_dies=1, delay=2),
        reapers=2,
        workers=1,
    ),
    "a follower, two reapers, one dies": Scenario(
        (ATOMIC, Call(way="atomic", joins=True)),
        faults(worker_dies=1, reaper_dies=1, delay=1),
        reapers=2,
        workers=1,
    ),
    "a follower, and another call": Scenario(
        (ATOMIC, Call(way="atomic", joins=True), ATOMIC),
        faults(worker_dies=1),
        reapers=1,
        workers=1,
    ),
    "a canvas waits for what is replaced": Scenario(
        (CANVAS, REPLACE), faults(publish_fails=1), reapers=1
    ),
    "a canvas waits, a worker dies": Scenario(
        (CANVAS, Call("replace", "atomic")), faults(worker_dies=1), reapers=1
    ),
    # -- the delivery guard
    "guard": Scenario((GUARDED,), faults(redelivery=1), late=True),
    "guard, a worker dies": Scenario((GUARDED,), faults(worker_dies=2, redelivery=1), late=True),
    "guard, a worker stops": Scenario((GUARDED,), faults(worker_stops=1, delay=2), late=True),
    "guard, a retry": Scenario((Call(way="guard", retries=1),), faults(redelivery=1), late=True),
    "guard, the store fails over": Scenario(
        (GUARDED,), faults(fail_over=1, redelivery=1), late=True
    ),
    # -- lanes
    "lane": Scenario((QUEUE, QUEUE), reapers=1),
    "lane, a caller dies": Scenario((QUEUE, QUEUE), faults(caller_dies=1), reapers=1, workers=1),
    "lane, a publish fails": Scenario((QUEUE, QUEUE), faults(publish_fails=1), reapers=1),
    "lane, no reply": Scenario((QUEUE, QUEUE), faults(no_reply=1), reapers=1, workers=1),
    "lane, a worker dies": Scenario((QUEUE_ATOMIC, QUEUE_ATOMIC), faults(worker_dies=1), reapers=1),
    "lane, a worker dies, late": Scenario(
        (QUEUE_ATOMIC, QUEUE_ATOMIC), faults(worker_dies=1), late=True, reapers=1, workers=1
    ),
    "lane, a worker and a reaper die": Scenario(
        (QUEUE_ATOMIC, QUEUE_ATOMIC), faults(worker_dies=1, reaper_dies=1), reapers=1, workers=1
    ),
    "lane, two reapers": Scenario(
        (QUEUE_ATOMIC, QUEUE_ATOMIC), faults(worker_dies=1), reapers=2, workers=1
    ),
    "lane, slow workers": Scenario((QUEUE_ATOMIC, QUEUE_ATOMIC), faults(delay=2), reapers=1),
    "lane, revoked": Scenario((QUEUE_ATOMIC, QUEUE_ATOMIC), faults(revoke=1), reapers=1, revokes=1),
    "lane, revoked, a worker dies": Scenario(
        (QUEUE_ATOMIC, QUEUE_ATOMIC),
        faults(revoke=1, worker_dies=1),
        reapers=1,
        workers=1,
        revokes=1,
    ),
    "lane, released": Scenario((QUEUE_ATOMIC, QUEUE_ATOMIC), faults(release=1), reapers=1),
    "lane, retry": Scenario(
        (Call("queue", "atomic", retries=1), QUEUE_ATOMIC), faults(worker_dies=1), reapers=1
    ),
    "lane, the store fails over": Scenario(
        (QUEUE_ATOMIC, QUEUE_ATOMIC), faults(fail_over=1), reapers=1, workers=1
    ),
    "lane of three": Scenario((QUEUE_ATOMIC,) * 3, reapers=1),
    "lane of three, a worker dies": Scenario(
        (QUEUE_ATOMIC,) * 3, faults(worker_dies=1), reapers=1, workers=1
    ),
    "lane of three, a worker dies, a slow caller": Scenario(
        (QUEUE_ATOMIC,) * 3, faults(worker_dies=1, delay=2), reapers=1, workers=1
    ),
    "lane of three, revoked": Scenario(
        (QUEUE_ATOMIC,) * 3, faults(revoke=1), reapers=1, workers=1, revokes=1
    ),
    "lane, another one ignores": Scenario((QUEUE_ATOMIC, QUEUE_ATOMIC, ATOMIC), reapers=1),
    "bounded lane": Scenario(
        (Call("queue", "atomic", max_queue=1),) * 3, faults(worker_dies=1), reapers=1, workers=1
    ),
    "lane with a limit of two": Scenario((TWO,) * 3, reapers=1),
    "lane with a limit of two, a worker dies": Scenario(
        (TWO,) * 3, faults(worker_dies=1), reapers=1
    ),
    "replace within a limit of two": Scenario(
        (*(Call(way="atomic", limit=2),) * 2, Call("replace", "atomic", limit=2)),
        faults(worker_dies=1),
        workers=1,
    ),
    "limit of two": Scenario((Call(way="atomic", limit=2),) * 3, faults(worker_dies=1), workers=2),
    # -- merged calls
    "merge": Scenario((MERGE, MERGE)),
    "merge, a caller dies": Scenario((MERGE, MERGE), faults(caller_dies=1)),
    "merge, a publish fails": Scenario((MERGE, MERGE), faults(publish_fails=1)),
    "merge, no reply": Scenario((MERGE, MERGE), faults(no_reply=1)),
    "merge, a worker dies": Scenario((MERGE, MERGE), faults(worker_dies=1), workers=1),
    "merge, a worker dies, late": Scenario(
        (MERGE_ATOMIC, MERGE_ATOMIC), faults(worker_dies=1), late=True
    ),
    "merge, redelivered": Scenario((MERGE_ATOMIC, MERGE_ATOMIC), faults(redelivery=1), late=True),
    "merge, retry": Scenario((Call("merge", retries=1), MERGE), faults(worker_dies=1), workers=1),
    "merge, retry, late": Scenario(
        (Call("merge", "atomic", retries=1), MERGE_ATOMIC),
        faults(redelivery=1),
        late=True,
    ),
    "merge, revoked": Scenario((MERGE, MERGE), faults(revoke=1)),
    "merge, released": Scenario((MERGE, MERGE), faults(release=1)),
    "merge, slow callers": Scenario((MERGE, MERGE), faults(delay=2), workers=1),
    "merge, slow workers": Scenario((MERGE_ATOMIC, MERGE_ATOMIC), faults(delay=6), workers=1),
    "merge, debounced": Scenario(
        (Call("merge", "atomic", delay=1, max_wait=2),) * 2, faults(delay=2, worker_dies=1)
    ),
    "merge three": Scenario((MERGE_ATOMIC,) * 3, faults(worker_dies=1), workers=1),
    "merge three, a caller dies": Scenario((MERGE,) * 3, faults(caller_dies=1), workers=1),
    "merge three, a publish fails": Scenario((MERGE,) * 3, faults(publish_fails=1), workers=1),
    "merge, one is followed": Scenario(
        (MERGE_ATOMIC, Call("merge", "atomic", joins=True)), faults(worker_dies=1), reapers=1
    ),
    "merge, one is followed, late": Scenario(
        (MERGE_ATOMIC, Call("merge", "atomic", joins=True)),
        faults(worker_dies=1),
        late=True,
        reapers=1,
        workers=1,
    ),
    # -- other states
    "until published": Scenario((Call(states=UNTIL_PUBLISHED),) * 2),
    "while it waits": Scenario((Call(states=WHILE_WAITING),) * 2),
    "until start": Scenario((Call(states=UNTIL_START), Call(states=UNTIL_START))),
    "until success": Scenario(
        (Call(states=UNTIL_SUCCESS), Call(states=UNTIL_SUCCESS)), faults(worker_dies=1)
    ),
    "until success, it fails": Scenario(
        (Call(states=UNTIL_SUCCESS, fails=True), Call(states=UNTIL_SUCCESS)), late=True
    ),
    "window": Scenario(
        (Call(states=EVERY_STATE, window=2), Call(states=EVERY_STATE, window=2)),
        faults(delay=2),
    ),
}

#: Explored by ``make test``: the small ones, less than a minute together.
SHORT = (
    *("one call", "two calls, a publish fails", "two calls, no reply", "two calls, revoked"),
    *("two calls, a worker dies", "two calls, released", "atomic", "atomic replace"),
    *("a call after the result", "replace, a caller dies", "scheduled"),
    *("replace a helped call", "revoke a helped call"),
    *("retry", "rerun, a worker dies", "a task calls itself", "a follower, a worker dies"),
    *("a follower, two reapers", "guard, a worker dies", "until success"),
    *("until published", "while it waits"),
    "a canvas waits, a worker dies",
    *("lane", "lane, no reply", "lane, a worker and a reaper die", "lane, revoked"),
    *("merge", "merge, no reply", "merge, a worker dies", "merge, redelivered"),
)
