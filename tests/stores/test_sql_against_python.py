"""The SQL store answers as the acts in Python do, whatever comes in whatever order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_unique.stores.base import Claim, Finish, Held, Start
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import Record, State
from celery_unique.stores.sql import SqlStore
from celery_unique.stores.sql import statements as dialects
from celery_unique.stores.sql.rows import FILLED_IN, PLACEHOLDER, fresh_record
from tests.stores.timing import PATIENCE_S

IDS = st.sampled_from(["a", "b", "c"])
DELIVERIES = st.sampled_from(["d1", "d2"])
SPANS = st.sampled_from([1, 40, 100, 1000])
STATES = st.sampled_from(["pswrt", "pswrtc", "psw", "r", "w", "s", "p", "t", "cdx", "wrd", ""])
TERMINAL = st.sampled_from([State.COMPLETED, State.DISCARDED, State.CANCELLED])
FINISHES = st.builds(Finish, IDS, DELIVERIES, TERMINAL, SPANS, SPANS, st.booleans(), SPANS)
REAPERS = st.sampled_from(["w1", "w1", "w2"])


def act(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


CLAIMS = st.builds(
    Claim,
    task_id=IDS,
    task_name=st.sampled_from(["", "shop.rebuild", 'odd "name" \x01lease \u2713']),
    states=STATES,
    grace_ms=SPANS,
    on_conflict=st.sampled_from(
        ["ignore", "reject", "replace", "replace_except_schedule", "rerun"]
    ),
    parent=st.sampled_from(["", "a", "b"]),
    max_wait_ms=st.sampled_from([0, 20_000]),
    keep_ms=st.sampled_from([0, 20_000]),
    window_ms=st.sampled_from([0, 0, 30, 500]),
    delay_ms=st.sampled_from([0, 0, 50, 300]),
    keep=st.sampled_from(["", "c", "cdx"]),
    arguments=st.sampled_from(["", "f00d"]),
    again=st.sampled_from([False, False, False, True]),
    join=st.sampled_from(["", "", "its message"]),
    canvas=st.booleans(),
)
FOLLOWERS = st.sampled_from(["f", "g", "a"])
TO_JOIN = st.builds(
    Claim,
    task_id=FOLLOWERS,
    task_name=st.just("shop.rebuild"),
    states=st.just("pswrt"),
    grace_ms=SPANS,
    keep=st.sampled_from(["", "c"]),
    window_ms=st.sampled_from([0, 500]),
    join=st.sampled_from(["one", 'other "\u2713"\n']),
)
TO_MERGE = st.builds(
    Claim,
    task_id=st.sampled_from(["a", "b", "f", "g"]),
    task_name=st.just("shop.rebuild"),
    states=st.sampled_from(["pswrt", "pswrt", "pw"]),
    grace_ms=SPANS,
    on_conflict=st.just("merge"),
    delay_ms=st.sampled_from([0, 0, 50, 300]),
    max_wait_ms=st.sampled_from([0, 100]),
    again=st.sampled_from([False, False, True]),
    join=st.sampled_from(["", "", "its message"]),
    # Some take more than one row.
    merge=st.sampled_from(['{"n":[1]}', '{"n":[2,3]}', f'{{"n":[{"4," * 3000}5]}}']),
    merge_max_bytes=st.sampled_from([20, 10_000, 1_000_000]),
)
ACTS = st.one_of(
    act("acquire", CLAIMS),
    act("acquire", CLAIMS),
    act("acquire", CLAIMS),
    act("confirm", IDS, SPANS),
    act("give_back", IDS, SPANS),
    act("help", IDS),
    act("forget", IDS),
    act("cancel", IDS, SPANS),
    act("release", st.one_of(st.none(), IDS)),
    act(
        "start",
        st.builds(
            Start,
            task_id=IDS,
            delivery=DELIVERIES,
            task_name=st.just("t"),
            lease_ms=SPANS,
            run_lease_ms=SPANS,
            created_at=st.sampled_from([0, 1_799_999_999_900]),
            window_ms=st.sampled_from([0, 500]),
            keep=st.sampled_from(["", "c"]),
            merge=st.booleans(),
        ),
    ),
    act("renew", IDS, st.one_of(st.just(""), DELIVERIES), SPANS, DELIVERIES),
    act("retry", IDS, DELIVERIES, SPANS, st.booleans()),
    act("finish", FINISHES),
    act("settle", FINISHES, st.booleans()),
    act("later", st.sampled_from([0, 1, 39, 40, 60, 1000])),
    act("sweep"),
    act("acquire", TO_JOIN),
    act("acquire", TO_JOIN),
    act("acquire", TO_MERGE),
    act("acquire", TO_MERGE),
    act("unmerge", FOLLOWERS),
    act("follow", TO_JOIN, IDS),
    act("complete_follower", FOLLOWERS),
    act("followers", st.one_of(st.none(), IDS)),
    act("reap", REAPERS, SPANS),
    act("promote", FOLLOWERS, REAPERS, SPANS, SPANS),
)


class Clock:
    """Microseconds that pass only when a step says so."""

    def __init__(self) -> None:
        self.us = 1_800_000_000_000_123

    def __call__(self) -> int:
        return self.us


def play(store: Any, key: str, step: tuple[Any, ...]) -> Any:
    name, *arguments = step
    if name == "sweep":
        store.sweep()  # how much there is to sweep is the store's own affair
        return None
    if name == "renew":
        task_id, delivery, span, waits_as = arguments
        return store.renew([Held(key, task_id, delivery, span, span, waits_as=waits_as)])
    reply = getattr(store, name)(key, *arguments)
    store.flush()
    return reply


def compare(steps: list[tuple[Any, ...]], key: str, clock: Clock, store: SqlStore) -> None:
    plain = MemoryStore()
    plain._now_us = clock  # type: ignore[method-assign]
    for number, step in enumerate(steps):
        if step[0] == "later":
            clock.us += step[1] * 1000
            continue

        expected = play(plain, key, step), plain.read(key), plain.followers(key)
        actual = play(store, key, step), store.read(key), store.followers(key)

        for answer in (expected, actual):
            answer[1][0].token = 0  # of a record that is gone: kept by one, not by the other
        assert actual == expected, f"step {number}: {step}"
        check_row(store, key)
    assert dict(store.walk()).get(key, Record()).tasks == plain.read(key)[0].tasks


def check_row(store: SqlStore, key: str) -> None:
    """What stands beside the record agrees with it."""
    row = store._database.run(lambda session: store._row(session, store._statements.see, key))
    if row.record is None:
        return
    record = Record.loads(row.record)
    tasks = record.tasks
    due = store._keys(store._statements.due, {"batch": 10_000})
    waits = record.following is not None and record.following.due_at <= row.now
    assert (key in due) == waits
    assert row.conflicts == 0 or len(tasks) == 1
    if row.holder_state != "-":
        (task,) = tasks.values()
        assert not task.released
        holder = (row.holder_state, row.holder_since, row.holder_until)
        assert holder == (task.state, task.created_at, task.lease)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_sql_store(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A store that takes the test's clock for the database's."""
    opened: list[SqlStore] = []
    on_client_clock = dataclasses.replace(dialects.POSTGRESQL, clock="CAST(:client_us AS BIGINT)")
    monkeypatch.setitem(dialects.DIALECTS, "postgresql", on_client_clock)
    on_client_clock = dataclasses.replace(dialects.MYSQL, clock=":client_us")
    monkeypatch.setitem(dialects.DIALECTS, "mysql", on_client_clock)

    def open_store(url: str) -> SqlStore:
        store = SqlStore.from_url(url, timeout_s=PATIENCE_S)
        store._client_us = clock  # type: ignore[method-assign]
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


RELAXED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(store: SqlStore, clock: Clock, max_examples: int) -> None:
    examples = iter(range(10**9))

    @settings(RELAXED, max_examples=max_examples)
    @given(st.lists(ACTS, min_size=2, max_size=25))
    def play_all(steps: list[tuple[Any, ...]]) -> None:
        compare(steps, f"key {next(examples)}", clock, store)

    play_all()


@pytest.mark.slow
def test_sqlite_answers_as_python_does(open_sql_store, clock, tmp_path):
    store = open_sql_store(f"sqlite:///{tmp_path / 'locks.db'}")
    check(store, clock, 300)


def test_postgresql_answers_as_python_does(open_sql_store, clock, postgres_url):
    store = open_sql_store(postgres_url)
    check(store, clock, 60)


@pytest.mark.parametrize("answers_inserts", [True, False], ids=["mariadb", "mysql"])
def test_mariadb_answers_as_python_does_in_its_own_and_in_mysqls_way(
    open_sql_store, clock, mariadb_url, answers_inserts
):
    store = open_sql_store(mariadb_url)
    store.ping()
    store._database._engine.dialect.insert_returning = answers_inserts
    check(store, clock, 40)


@given(CLAIMS)
def test_a_fresh_record_is_what_python_would_store(claim):
    now = 1_800_000_000_000
    offsets = (0, claim.grace_ms, claim.keep_ms or claim.window_ms, claim.delay_ms)
    plain = MemoryStore()
    plain._now_us = lambda: now * 1000  # type: ignore[method-assign]
    plain.acquire("key", claim)

    text = fresh_record(claim)
    for name, offset in zip(FILLED_IN, offsets, strict=True):
        text = text.replace(PLACEHOLDER + name, str(now + offset))

    assert text == plain.read("key")[0].dumps()
