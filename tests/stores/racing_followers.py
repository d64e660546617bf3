"""Calls that join a task at the moment at which it ends: none of them may be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import (
    RUN_LEASE,
    SUCCESS,
    UNTIL_DONE,
    claim,
    confirm,
    finish,
    start,
)
from tests.stores.racing import Call, Round, connected, key_of

#: How many calls each process makes in a round, one after the other.
CALLS = 3
WORKER = 0


class Asked(NamedTuple):
    task_id: str
    outcome: str
    holder: str


def joining_racer(url: str, race: str, process: int) -> Round:
    """One process is the worker that ends the holder and completes who follows it; the others
    call. In every second round the ended task is kept, and calls ask for such a task too.

    The worker's answer is whom it completed; that of the others what they were told.
    """
    store = connected(url)
    if process == WORKER:
        _run_holder(store, race, 0)

    def work(number: int) -> list[str]:
        key, ended = key_of(race, number), finish("holder")
        reply = store.finish(key, ended)
        completed = _complete(store, key) if reply.followers else []
        completed += _complete(store, key)  # its second look, before it settles
        store.settle(key, ended, mark_done=False)
        store.flush()
        _run_holder(store, race, number + 1)
        return completed

    def call(number: int) -> list[Asked]:
        states = UNTIL_DONE + (SUCCESS if number % 2 else "")
        told = []
        for each in range(CALLS):
            mine = f"p{process}-{each}"
            reply = store.acquire(key_of(race, number), claim(mine, states=states, join=mine))
            told.append(Asked(mine, reply.outcome, reply.holder.task_id if reply.holder else ""))
        return told

    return work if process == WORKER else call


def _run_holder(store: LockStore, race: str, number: int) -> None:
    key = key_of(race, number)
    store.acquire(key, claim("holder", keep=SUCCESS if number % 2 else ""))
    confirm(store, key, "holder")
    store.start(key, start("holder"))


def _complete(store: LockStore, key: str) -> list[str]:
    followers = [follower_id for follower_id, _ in store.followers(key, "holder")]
    for follower_id in followers:
        store.complete_follower(key, follower_id)
    return followers


def lost_followers(
    store: LockStore, race: str, rounds: list[list[Call]], figures: Counter[str]
) -> list[str]:
    """Whoever was told that it has joined, but neither was completed nor can be found."""
    due = set(store.due(limit=len(rounds)))
    return [
        f"round {number}: {problem}"
        for number, calls in enumerate(rounds)
        for problem in _problems(store, key_of(race, number), calls, due, figures)
    ]


def _problems(
    store: LockStore, key: str, calls: list[Call], due: set[str], figures: Counter[str]
) -> Iterator[str]:
    completed: list[str] = calls[WORKER].answer
    asked: Iterable[Asked] = [
        one for number, call in enumerate(calls) if number != WORKER for one in call.answer
    ]
    orphans = {o.follower_id for o in store.reap(key, "reaper", RUN_LEASE)} if key in due else set()
    waiting = {follower_id: one.holder for follower_id, one in store.followers(key)}
    if len(completed) != len(set(completed)):
        yield "somebody was completed twice"
    for one in asked:
        fate = one.outcome
        if one.outcome == "joined":
            places = [one.task_id in completed, waiting.get(one.task_id) is not None]
            if sum(places) != 1:
                yield f"{one} is in {sum(places)} places"
            elif one.task_id in completed:
                fate = "joined and completed by the worker"
            elif one.task_id in orphans:
                fate = "joined and found by the reaper"
            else:
                fate = "joined a task that came after"
                if waiting[one.task_id] == "holder":
                    yield f"{one} waits for a task that is over, and is not due"
        elif one.outcome not in ("created", "ended") or one.task_id in waiting:
            yield f"{one}, which is not what it may be told"
        figures[fate] += 1
