"""Sixteen processes that call the same task at the same moment: one task, whom everybody names."""

from __future__ import annotations

import time

import pytest

from tests.stores.racing import PROCESSES, Racers, overlap_of, wrong_rounds
from tests.workers.calling_racers import delay_racer

#: ``tests/stores/test_races.py`` makes its thousand on each store, and the race for idempotency
#: keys another thousand through the same calls.
ROUNDS = 300


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_calls_made_at_once_one_is_published_and_the_others_name_it(redis_url, report):
    began = time.monotonic()

    with Racers() as racers:
        rounds = racers.race(delay_racer, redis_url, rounds=ROUNDS)

    took_s = time.monotonic() - began
    attempts = [[call._replace(answer=call.answer.attempt) for call in calls] for calls in rounds]
    published = [
        [task_id for call in calls for task_id in call.answer.published] for calls in rounds
    ]
    wrong, overlap = wrong_rounds(attempts), overlap_of(attempts)
    helped = sum(len(ids) - 1 for ids in published)
    report(
        f"race through delay: {PROCESSES} processes, {len(rounds)} rounds, "
        f"{len(rounds) - len(wrong)} with one winner whom all others name; {overlap}; "
        f"{helped} times a slow winner was helped; {took_s:.1f} s"
    )
    assert wrong == []
    for ids, calls in zip(published, attempts, strict=True):
        assert set(ids) == {calls[0].answer.holder}
    assert overlap.share >= 0.9
