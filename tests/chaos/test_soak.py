"""The soak: what it counts, which run is next, and the bounds on its page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import rate, soak
from tests.chaos.checker import check
from tests.chaos.evidence import NONE, Soaked, read_history, tables, upper_bound, write_history
from tests.chaos.rate import Account, account
from tests.chaos.run import SETUPS
from tests.chaos.soak import MIXED, all_cells, counts, next_cell
from tests.chaos.stage import Plan

KEY = "early(1)"


def soaked(**facts: Any) -> Soaked:
    known: dict[str, Any] = {
        "date": "2026-11-18T20:15:00+00:00",
        "commit": "abc",
        "machine": "2 cores",
        "broker": "redis",
        "store": "redis",
        "fault": NONE,
        "seed": 1,
        "seconds": 60,
        "calls": 1000,
        "runs": 100,
        **dict.fromkeys(("lost", "duplicated", "other", "excused_lost", "excused_duplicated"), 0),
    }
    return Soaked(**known | facts)


# -- calls without faults ----------------------------------------------------------------


def batch(t: float, *calls: tuple[str, str]) -> dict[str, Any]:
    return {"what": "batch", "t": t, "calls": [[KEY, *call] for call in calls]}


def ran(t: float, task_id: str, until: float, key: str = KEY) -> dict[str, Any]:
    return {"what": "ran", "t": t, "id": task_id, "key": key, "until": until}


def counted(events: Iterable[dict[str, Any]]) -> tuple[int, int]:
    found = account(events)
    return found.lost, found.duplicated


def test_a_call_that_ran_is_neither_lost_nor_duplicated():
    events = [batch(1, ("a", "created"), ("a", "deduplicated")), ran(2, "a", 3)]

    assert account(events) == Account(2, 1, 0, 0, 0, 0.0)


def test_a_call_that_never_ran_is_lost_and_so_are_its_duplicates():
    assert counted([batch(1, ("a", "created"), ("a", "deduplicated"))]) == (2, 0)


def test_a_duplicate_of_a_task_that_was_over_is_lost():
    events = [batch(1, ("a", "created")), ran(2, "a", 3)]

    assert counted([*events, batch(3.5, ("a", "deduplicated"))]) == (0, 0)
    assert counted([*events, batch(4, ("a", "deduplicated"))]) == (1, 0)


def test_a_task_that_ran_twice_is_duplicated():
    assert counted([batch(1, ("a", "created")), ran(2, "a", 3), ran(4, "a", 5)]) == (0, 1)


def test_two_tasks_of_one_key_at_once_are_duplicated():
    calls = batch(1, ("a", "created"), ("b", "created"))

    assert counted([calls, ran(2, "a", 3), ran(2.5, "b", 4)]) == (0, 1)
    assert counted([calls, ran(2, "a", 3), ran(3, "b", 4)]) == (0, 0)
    assert counted([calls, ran(2, "a", 3), ran(2.5, "b", 4, key="early(2)")]) == (0, 0)


@pytest.mark.parametrize("what", ["lost", "duplicated", "left"])
def test_an_account_with_anything_in_it_fails(what):
    clean = {"calls": 1, "runs": 1, "lost": 0, "duplicated": 0, "left": 0, "seconds": 1.0}

    assert Account(**clean).passed
    assert not Account(**clean | {what: 1}).passed


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(120)
def test_no_call_is_lost_or_duplicated_at_a_high_rate(tmp_path):
    found = rate.run("one redis", "redis", seed=1, seconds=1, directory=tmp_path)

    assert found.passed, found
    assert 0 < found.runs <= found.calls


# -- calls under a fault ------------------------------------------------------------------


def test_what_a_fault_explains_is_counted_apart():
    key = {"task": "tests.chaos.app.early", "arg": 1}
    leases = {"run_lease": 3, "queue_lease": 20, "grace": 5, "visibility": 4}
    call = {"pid": 1, **key}
    events: list[dict[str, Any]] = [
        {"t": 0, "what": "settings", "broker": "rabbitmq", "clock_offset": 0, **leases},
        {"t": 1, "what": "call", "call": "1", **call},
        {"t": 1.1, "what": "called", "call": "1", "id": "a", "outcome": "created", **call},
        {"t": 2, "what": "call", "call": "2", **call},
        {"t": 2.1, "what": "called", "call": "2", "id": "b", "outcome": "created", **call},
        {"t": 3, "what": "call", "call": "3", **call},
        {"t": 3.1, "what": "refused", "call": "3", **call},
        {"t": 3.2, "what": "ack", "id": "b", "worker": "w1", "pid": 11},
        {"t": 3.3, "what": "fault", "fault": "pool child killed", "until": 3.4, "pids": [11]},
    ]

    found = counts(check(events))

    assert (found["calls"], found["lost"], found["excused_lost"]) == (2, 1, 1)
    assert (found["duplicated"], found["excused_duplicated"], found["other"]) == (0, 0, 0)


# -- which run is next ----------------------------------------------------------------------


def test_the_next_run_is_of_the_fault_that_lacks_most_on_the_store_that_has_least():
    cells = [
        ("redis", store, fault) for fault in (NONE, "evicted") for store in ("redis", "valkey")
    ]
    none, evicted = cells[:2], cells[2:]

    assert next_cell(cells, []) == none[0]
    history = [soaked(calls=500_000)]
    assert next_cell(cells, history) == evicted[0]
    history += [soaked(fault="evicted", calls=12_000)]
    assert next_cell(cells, history) == none[1]
    assert next_cell(evicted, history) == evicted[1]


def test_every_fault_is_soaked_on_some_store():
    found = {fault for _, _, fault in all_cells()}

    assert found >= {NONE, "worker killed", "clock jumped", "evicted", "partition", "slots moved"}


def test_two_releases_are_soaked_side_by_side_on_every_store(tmp_path, monkeypatch):
    played: list[tuple[str, list[str]]] = []

    def run(plan: Plan, directory: Path, seconds: float, episode_s: float, kinds: list[str]) -> Any:
        played.append((plan.previous, kinds))
        return check([{"t": 0, "what": "settings", "clock_offset": 0, **asdict(plan)}])

    monkeypatch.setattr(soak.chaos, "run", run)
    mixed = [cell for cell in all_cells() if cell[2] == MIXED]
    assert {(broker, store) for broker, store, _ in mixed} == {*SETUPS}

    done = soak._soak(mixed[0], "abc", 1, 60, tmp_path)

    assert done.fault == MIXED
    [(previous, kinds)] = played
    assert (Path(previous) / "celery_unique" / "__init__.py").exists()
    assert {NONE, "worker killed", "producer killed"} == {*kinds}


def test_a_store_that_has_not_that_fault_is_an_error(capsys):
    assert soak.main(["--store", "postgresql", "--fault", "evicted"]) == 2
    assert "no run has the store postgresql and the fault evicted" in capsys.readouterr().out


# -- the page -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "bound"),
    # Half of the 90 % quantiles of chi-square with 2, 4, 12 and 22 degrees, as tables have them.
    [(0, 2.996), (1, 4.744), (5, 10.513), (10, 16.962)],
)
def test_the_bound_is_that_of_a_poisson_distribution(events, bound):
    assert upper_bound(events) == pytest.approx(bound, abs=0.001)


def test_the_tables_have_a_rate_and_its_bound_by_fault_and_by_store():
    text = tables(
        [
            soaked(calls=600_000),
            soaked(calls=400_000, store="postgresql"),
            soaked(fault="evicted", calls=10_000, lost=1, excused_duplicated=3),
        ]
    )

    assert "| none | 1,000,000 | 0 | 3.0 | 0 | 3.0 | 0 | 0 |" in text
    assert "| none | postgresql | 400,000 | 0 | 7.5 | 0 | 7.5 | 0 | 0 |" in text
    assert "| evicted | 10,000 | 100 | 474 | 0 | 300 | 0 | 300 |" in text
    assert "| 2026-11-18 | `abc` | 2 cores | 3 | 3 | 1,000,000 | 10,000 | 1 |" in text


def test_the_history_is_kept_as_it_was(tmp_path):
    path = tmp_path / "evidence.json"
    history = [soaked(), soaked(fault="evicted", lost=1)]

    write_history(history, path)

    assert read_history(path) == history
    assert [each.passed for each in history] == [True, False]
