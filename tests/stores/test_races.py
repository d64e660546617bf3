"""Sixteen processes at the same moment: one winner, whom everybody names."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from celery_unique.stores import open_store
from tests.stores.django_project import DjangoProject, django_acquire_racer
from tests.stores.racing import (
    PROCESSES,
    ROUNDS,
    Attempt,
    Call,
    RacerFailed,
    Racers,
    acquire_racer,
    failing_racer,
    key_of,
    overlap_of,
    racy_acquire_racer,
    start_racer,
    token_racer,
    tokens_out_of_order,
    wrong_rounds,
)
from tests.stores.racing_followers import Asked, joining_racer, lost_followers
from tests.support import RedisCluster, RedisSentinels, eventually

pytestmark = pytest.mark.timeout(300)

RACED = [
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("sqlite_url", id="sqlite"),
    pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
    pytest.param("mariadb_url", id="mariadb", marks=pytest.mark.server),
    pytest.param("cluster_url", id="cluster", marks=pytest.mark.server),
]
#: Reached in another way, but the same server carries the acts out.
ALSO_RACED = [
    pytest.param("valkey_url", id="valkey", marks=pytest.mark.server),
    pytest.param("sentinel_url", id="sentinel", marks=pytest.mark.server),
    pytest.param("tls_url", id="tls", marks=pytest.mark.server),
]
#: Fewer rounds than on the first three, which share the code or the server with these.
FEWER = {"mariadb": 60, "cluster": 300, "valkey": 200, "sentinel": 200, "tls": 200}


@pytest.fixture(scope="module")
def racers() -> Iterator[Racers]:
    with Racers() as racers:
        yield racers


@pytest.fixture(params=RACED)
def raced_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("raced_url", [*RACED, *ALSO_RACED], indirect=True)
def test_every_round_has_one_winner_whom_all_losers_name(racers, raced_url, request, report):
    number = FEWER.get(request.node.callspec.id, ROUNDS)
    began = time.monotonic()

    rounds = racers.race(acquire_racer, raced_url, "acquire", rounds=number)

    took_s = time.monotonic() - began
    wins = Counter(
        number for calls in rounds for number, call in enumerate(calls) if call.answer.created
    )
    wrong, overlap = wrong_rounds(rounds), overlap_of(rounds)
    report(
        f"race on {request.node.callspec.id}: {PROCESSES} processes, {len(rounds)} rounds, "
        f"{len(rounds) - len(wrong)} with one winner whom all others name; {overlap}; "
        f"{len(wins)} processes won at least once; {took_s:.1f} s"
    )
    assert wrong == []
    assert overlap.share >= 0.9


@pytest.mark.slow
def test_every_message_is_started_by_one_delivery_and_tokens_only_grow(
    racers, raced_url, request, report
):
    number = 50 if request.node.callspec.id in FEWER else 100

    rounds = racers.race(start_racer, raced_url, "start", rounds=number)

    tokens = [[call.answer for call in calls if call.answer is not None] for calls in rounds]
    overlap = overlap_of(rounds)
    report(f"starts on {request.node.callspec.id}: {PROCESSES} processes, {overlap}")
    assert [len(of_round) for of_round in tokens] == [1] * len(rounds)
    in_order = [token for of_round in tokens for token in of_round]
    assert in_order == sorted(set(in_order))
    assert overlap.share >= 0.9


@pytest.mark.slow
def test_no_two_starts_share_a_token_and_a_later_start_has_a_larger_one(racers, raced_url):
    rounds = racers.race(token_racer, raced_url, "tokens", rounds=25)

    calls = [call for calls in rounds for call in calls]
    assert len({call.answer for call in calls}) == len(calls)
    assert tokens_out_of_order(calls) == []


@pytest.mark.slow
def test_no_call_that_joins_is_lost_while_the_holder_ends(racers, raced_url, request, report):
    number = 8 if request.node.callspec.id == "mariadb" else 12
    began = time.monotonic()

    rounds = racers.race(joining_racer, raced_url, "joining", rounds=number)

    took_s = time.monotonic() - began
    figures: Counter[str] = Counter()
    store = open_store(raced_url, timeout_s=30.0)
    lost = lost_followers(store, "joining", rounds, figures)
    store.close()
    told = ", ".join(f"{what} {count}" for what, count in sorted(figures.items()))
    report(
        f"joining on {request.node.callspec.id}: {PROCESSES - 1} processes while one ends the "
        f"holder, {len(rounds)} rounds, {sum(figures.values())} calls: {told}; "
        f"{len(lost)} lost; {took_s:.1f} s"
    )
    assert lost == []
    assert figures["joined and completed by the worker"] > 0
    assert figures["created"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("url", [DjangoProject.cache_url, DjangoProject.database_url])
def test_a_django_projects_stores_have_one_winner_in_every_round_too(
    racers, django_project, url, report
):
    rounds = racers.race(django_acquire_racer, django_project.settings, url, url, rounds=100)

    wrong, overlap = wrong_rounds(rounds), overlap_of(rounds)
    report(f"race on {url}: {PROCESSES} processes, {len(wrong)} of {len(rounds)} wrong; {overlap}")
    assert wrong == []
    assert overlap.share >= 0.9


# -- a primary that dies in the middle ------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RedisSentinels, RedisCluster])
def test_a_primary_that_dies_in_the_middle_spoils_one_round_at_most(
    racers, start_server, kind, report
):
    """Only a round whose winner was told so and not yet replicated can have another one."""
    servers = start_server(kind)
    race = f"fail-over of {kind.__name__}"
    killed_at: list[int] = []

    def kill() -> None:
        store = open_store(servers.url, timeout_s=30.0)
        eventually(lambda: store.read(key_of(race, 100))[0], timeout=120, interval=0.005)
        store.close()
        if isinstance(servers, RedisCluster):
            servers.fail_over(servers.primaries()[0], kill=True)
        else:
            servers.look_closely()
            servers.primary().kill()
        killed_at.append(time.monotonic_ns())

    killing = threading.Thread(target=kill)
    killing.start()
    rounds = racers.race(acquire_racer, servers.url, race, rounds=400)
    killing.join()

    wrong = wrong_rounds(rounds)
    slowest = max(call.ended_ns - call.began_ns for calls in rounds for call in calls) / 1e9
    report(
        f"race on {kind.__name__}, a primary killed in the middle: {len(rounds)} rounds, "
        f"{len(wrong)} with more than one winner; the slowest call took {slowest:.1f} s"
    )
    spoiled = {int(problem.split()[1].rstrip(":")) for problem in wrong}
    assert len(spoiled) <= 1
    assert rounds[100][0].began_ns < killed_at[0] < rounds[-1][0].ended_ns  # it was in the middle
    for number in spoiled:
        assert max(call.ended_ns for call in rounds[number]) > killed_at[0] - 1_000_000_000


# -- the checks can fail ------------------------------------------------------


def test_a_follower_that_nobody_can_find_is_noticed():
    store = open_store("memory://")
    worker = Call(0, 1, [])
    told = Call(0, 1, [Asked("f", "joined", "holder")])

    assert lost_followers(store, "race", [[worker, told]], Counter()) != []


@pytest.mark.slow
@pytest.mark.server
def test_a_store_that_looks_first_and_writes_then_is_caught(racers, redis_url, report):
    rounds = racers.race(racy_acquire_racer, redis_url, "racy", rounds=200)

    wrong = wrong_rounds(rounds)
    report(f"race on a racy store: {len(rounds)} rounds, {len(wrong)} faults found")
    assert wrong != []


@pytest.mark.slow
def test_a_process_that_fails_is_reported_and_the_next_race_goes_on(racers, sqlite_url):
    with pytest.raises(RacerFailed, match="the lights went out"):
        racers.race(failing_racer, rounds=2)

    assert wrong_rounds(racers.race(acquire_racer, sqlite_url, "after", rounds=2)) == []


def _round(*answers: Attempt) -> list[Call]:
    return [Call(0, 1, answer) for answer in answers]


@pytest.mark.parametrize(
    ("calls", "problems"),
    [
        (_round(Attempt(True, "a"), Attempt(False, "a")), []),
        (
            _round(Attempt(True, "a"), Attempt(True, "b")),
            ["round 0: 2 winners: ['a', 'b']"],
        ),
        (
            _round(Attempt(True, "a"), Attempt(False, "b")),
            ["round 0: losers name ['b'], the winner is ['a']"],
        ),
        (
            _round(Attempt(False, "b"), Attempt(False, "b")),
            ["round 0: 0 winners: []", "round 0: losers name ['b'], the winner is []"],
        ),
    ],
)
def test_a_round_is_right_only_with_one_winner_whom_all_losers_name(calls, problems):
    assert wrong_rounds([calls]) == problems


def test_calls_that_only_touch_do_not_overlap():
    touching = [Call(0, 5, None), Call(5, 9, None)]
    crossing = [Call(0, 6, None), Call(5, 9, None), Call(6, 7, None)]

    overlap = overlap_of([touching, crossing])

    assert (overlap.rounds, overlap.overlapped, overlap.at_once) == (2, 1, 1.5)


def test_tokens_are_compared_only_where_one_call_came_after_the_other():
    first, beside, after = Call(0, 5, 20), Call(4, 9, 10), Call(6, 8, 15)

    assert tokens_out_of_order([first, beside]) == []
    assert tokens_out_of_order([first, beside, after]) == [(first, after)]
