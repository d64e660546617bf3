"""The commands in this process, on every kind of store."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_unique import lookup
from celery_unique.cli import list as list_module
from celery_unique.cli import main, unique
from celery_unique.config.app_state import state_of
from celery_unique.stores.base import Claim
from tests.support.app import advance, flush, make_app, plain_app

Run = Callable[..., "Ran"]


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def ids(self) -> set[str]:
        return {row["task_id"] for row in self.json()}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(app, "list", "--json")``: what main() returns and prints."""

    def run_command(app: Any, *argv: str) -> Ran:
        capsys.readouterr()
        code = main(app, argv, "celery unique")
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run_command


@pytest.fixture(
    params=["memory", "sqlite_url", pytest.param("redis_url", marks=pytest.mark.server)]
)
def store_url(request: pytest.FixtureRequest) -> str:
    """Each way to walk; the tests of many locks have PostgreSQL."""
    if request.param == "memory":
        return "memory://"
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def shop(app: Celery) -> Celery:
    @app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    @app.task(name="shop.digest", unique=True, unique_on_conflict="reject", shared=False)
    def digest(user_id: int) -> None: ...

    @app.task(name="shop.replace", unique=True, unique_on_conflict="replace", shared=False)
    def replace(user_id: int) -> None: ...

    @app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    return app


# -- list, stats ---------------------------------------------------------------------------------


def test_list_by_task_state_age_id_and_call(shop, run):
    old = shop.tasks["shop.rebuild"].delay(1)
    advance(shop, 7200)
    new = shop.tasks["shop.rebuild"].delay(2)
    later = shop.tasks["shop.digest"].apply_async((1,), countdown=600)
    paid = shop.tasks["shop.pay"].apply_async((5,), idempotency_key="order-7")
    flush(shop)

    def listed(*options: str) -> set[str]:
        ran = run(shop, "list", "--json", *options)
        assert ran.code == 0, ran.err
        return ran.ids()

    assert listed() == {old.id, new.id, later.id, paid.id}
    assert listed("--task", "shop.rebuild") == {old.id, new.id}
    assert listed("--task", "shop.[pr]*") == {old.id, new.id, paid.id}
    assert listed("--state", "scheduled") == {later.id}
    assert listed("--state", "waiting", "--older-than", "PT1H") == {old.id}
    assert listed("--older-than", "7300") == set()
    assert listed("--newer-than", "3600", "--task", "shop.rebuild") == {new.id}
    assert listed("--older-than", "0") == {old.id, new.id, later.id, paid.id}
    assert listed("--task-id", paid.id) == {paid.id}
    assert listed("--key", new.unique_key) == {new.id}
    assert listed("--task", "shop.rebuild", "--args", "[1]") == {old.id}
    assert listed("--task", "shop.rebuild", "--kwargs", '{"shop_id": 2}') == {new.id}
    assert listed("--task", "shop.pay", "--idempotency-key", "order-7") == {paid.id}
    assert len(listed("--limit", "2")) == 2


def test_ages_and_states_in_other_words(shop, run):
    old = shop.tasks["shop.rebuild"].delay(1)
    advance(shop, 5400)
    new = shop.tasks["shop.rebuild"].delay(2)
    flush(shop)

    def listed(*options: str) -> set[str]:
        return run(shop, "list", "--json", *options).ids()

    assert listed("--older-than", "10m") == listed("--older-than", "1h29m") == {old.id}
    assert listed("--older-than", "1h31m") == set()
    assert listed("--newer-than", "1h") == {new.id}
    assert listed("--state", "queued") == {old.id, new.id}
    assert listed("--state", "running") == set()


def test_rows_are_sorted(shop, run, monkeypatch):
    rebuild, digest = shop.tasks["shop.rebuild"], shop.tasks["shop.digest"]
    first = rebuild.delay(1).id
    advance(shop, 60)
    second = digest.delay(2).id
    advance(shop, 60)
    third = rebuild.delay(3).id
    rebuild.delay(3)
    flush(shop)

    def ids(*options: str) -> list[str]:
        return [row.split()[4] for row in run(shop, "list", *options).out.splitlines()[1:]]

    assert ids() == ids("--sort", "age") == [first, second, third]
    assert ids("--sort", "task") == [second, first, third]
    assert ids("--sort", "absorbed") == [third, first, second]
    assert ids("--limit", "2") == [first, second]
    monkeypatch.setattr(list_module, "MOST_SORTED", 2)
    assert set(ids()) == {first, second, third}
    assert "More than 2 locks: the others in no order" in run(shop, "list").err


def test_a_row_has_the_shortened_key_and_json_the_whole_one(shop, run):
    result = shop.tasks["shop.rebuild"].delay(1)
    flush(shop)

    table, rows = run(shop, "list"), run(shop, "list", "--json")

    heading, row = table.out.splitlines()
    assert heading.split() == ["KEY", "STATE", "AGE", "ABSORBED", "ID", "TASK", "WORKER"]
    assert row.split()[:2] == [result.unique_key[:14], "available"]
    assert row.split()[3:] == ["0", result.id, "shop.rebuild", "-"]
    [document] = rows.json()
    assert document["key"] == result.unique_key
    assert result.unique_key not in table.out


def test_without_locks_there_is_nothing_to_list(shop, run):
    ran = run(shop, "list")

    assert (ran.code, ran.out) == (0, "")
    assert "No locks." in ran.err


def test_stats_count_tasks_states_and_absorbed_calls(shop, run):
    rebuild = shop.tasks["shop.rebuild"]
    for shop_id in (1, 1, 1, 2):
        rebuild.delay(shop_id)
    flush(shop)

    [told] = run(shop, "stats", "--json").json()

    assert (told["keys"], told["locks"], told["duplicates"]) == (2, 2, 2)
    assert told["states"] == {"available": 2}
    assert told["tasks"]["shop.rebuild"]["duplicates"] == 2


def test_stats_of_one_have_no_plural(local_app, run):
    @local_app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(1)
    rebuild.delay(1)

    ran = run(local_app, "stats")

    said = "1 key, 1 lock, 0 marks of finished or superseded tasks, 1 call absorbed"
    assert ran.out.splitlines()[-1] == said


# -- show, why -----------------------------------------------------------------------------------


def test_why_a_call_was_dropped(shop, run):
    rebuild = shop.tasks["shop.rebuild"]
    first = rebuild.delay(7)
    rebuild.delay(shop_id=7)
    rebuild.delay(7, full=False)
    flush(shop)
    advance(shop, 600)

    ran = run(shop, "why", "shop.rebuild", "--args", "[7]")

    assert ran.code == 0
    assert f"key          {first.unique_key}" in ran.out
    assert 'made from    {"args":{"shop_id":7},"type":"shop.rebuild"}' in ran.out
    assert (
        f"A call now is not published: it gets the id and the result of the task that holds "
        f"its key ({first.id})." in ran.out
    )
    assert "available: published, and waits for a worker" in ran.out
    assert re.search(r"called +10m", ran.out)
    assert re.search(r"absorbed +2 calls, the last 10m", ran.out)
    assert re.search(r"run by +no worker yet", ran.out)
    assert "revoking it" in ran.out
    assert f"unique release --key {first.unique_key}" in ran.out


def verdict(run: Run, app: Celery, *argv: str) -> tuple[int, str, str | None]:
    ran = run(app, "why", *argv, "--json")
    [told] = ran.json()
    return ran.code, told["call"]["outcome"], told["call"]["task_id"]


def test_why_tells_what_would_become_of_a_call(shop, run):
    digest, replace = shop.tasks["shop.digest"].delay(1), shop.tasks["shop.replace"].delay(1)
    paid = shop.tasks["shop.pay"].apply_async((5,), idempotency_key="order-7")
    flush(shop)
    by_key = ("shop.pay", "--idempotency-key", "order-7")

    assert verdict(run, shop, "shop.rebuild", "--args", "[1]") == (1, "created", None)
    assert verdict(run, shop, "shop.digest", "--args", "[1]") == (0, "rejected", digest.id)
    assert verdict(run, shop, "shop.digest", "--args", "[2]") == (1, "created", None)
    assert verdict(run, shop, "shop.replace", "--args", "[1]") == (0, "replaced", replace.id)
    assert verdict(run, shop, *by_key) == (0, "deduplicated", paid.id)
    assert verdict(run, shop, *by_key, "--args", "[5]") == (0, "deduplicated", paid.id)
    assert verdict(run, shop, *by_key, "--args", "[6]") == (0, "conflict", paid.id)


def test_why_tells_that_a_call_releases_the_key_of_a_stale_holder(local_app, run):
    @local_app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> None: ...

    holder = rebuild.delay(1)
    flush(local_app)
    asked = ("shop.rebuild", "--args", "[1]")
    local_app.backend.store_result(holder.id, None, "SUCCESS")
    assert verdict(run, local_app, *asked) == (0, "deduplicated", holder.id)

    advance(local_app, 61)

    assert verdict(run, local_app, *asked) == (0, "created", holder.id)
    said = run(local_app, "why", *asked).out
    assert f"A call now releases the key of a stale holder, and is published ({holder.id})" in said
    assert "yes: its task has ended (SUCCESS in the result backend)" in said
    assert rebuild.delay(1).outcome == "created"


def test_asking_why_changes_nothing(shop, run):
    first = shop.tasks["shop.rebuild"].delay(7)
    flush(shop)
    before = state_of(shop).store.read(first.unique_key)[0]

    run(shop, "why", "shop.rebuild", "--args", "[7]")

    assert state_of(shop).store.read(first.unique_key)[0] == before


def test_why_and_show_by_key_shortened_key_and_id(shop, run):
    first = shop.tasks["shop.rebuild"].delay(7)
    shop.tasks["shop.rebuild"].delay(8)
    flush(shop)

    for what in (first.unique_key, first.unique_key[:14], first.unique_key[2:14], first.id):
        for command in ("show", "why"):
            ran = run(shop, command, what, "--json")
            assert ran.code == 0
            [told] = ran.json()
            assert told["key"] == first.unique_key
            assert [task["task_id"] for task in told["tasks"]] == [first.id]
    shown = run(shop, "show", first.id)
    assert "created at" in shown.out
    assert first.unique_key in shown.out


def test_why_tells_of_a_task_that_was_superseded_or_revoked(shop, run):
    old = shop.tasks["shop.replace"].delay(1)
    flush(shop)
    new = shop.tasks["shop.replace"].delay(1)
    flush(shop)

    ran = run(shop, "why", old.id)

    assert ran.code == 0
    assert f"Task {old.id} is marked superseded (by {new.id})" in ran.out


@pytest.mark.parametrize(
    "eta",
    [
        datetime(9999, 12, 31, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(9999, 12, 31, 12, tzinfo=timezone(timedelta(hours=-12))),
        datetime(9999, 6, 1, tzinfo=UTC),
    ],
    ids=["last day", "last moment", "another zone", "last year"],
)
def test_an_eta_at_the_end_of_all_dates_is_shown(shop, run, eta):
    """Its lease ends after that, in the year 10000, which no date has."""
    task = shop.tasks["shop.rebuild"]
    sent = task.apply_async((7,), eta=eta)
    flush(shop)

    lock = lookup(task, (7,))

    assert lock is not None
    last = datetime(9999, 12, 31, tzinfo=UTC)
    assert abs(lock.eta - min(eta, last)) < timedelta(minutes=1)
    assert lock.expires_at.astimezone(timezone(timedelta(hours=14))).year == 9999
    [row] = run(shop, "list", "--json").json()
    assert (row["task_id"], row["eta"][:4]) == (sent.id, "9999")
    for command in ("list", "stats", "show", "why"):
        name = () if command in ("list", "stats") else (sent.id,)
        ran = run(shop, command, *name)
        assert ran.code == 0, (command, ran.err)
    assert run(shop, "why", "shop.rebuild", "--args", "[7]", "--json").code == 0


@pytest.mark.parametrize("command", ["show", "why"])
def test_what_is_not_there_is_not_found(shop, run, command):
    ran = run(shop, command, "shop.rebuilt")

    assert (ran.code, ran.out) == (1, "")
    assert "Nothing is recorded of shop.rebuilt. Did you mean the task shop.rebuild?" in ran.err


# -- release -------------------------------------------------------------------------------------


def test_release_by_call_and_by_idempotency_key(shop, run):
    shop.tasks["shop.rebuild"].delay(1)
    shop.tasks["shop.rebuild"].delay(2)
    shop.tasks["shop.pay"].apply_async((5,), idempotency_key="order-7")
    flush(shop)

    by_call = run(shop, "release", "--task", "shop.rebuild", "--args", "[1]", "--yes")
    by_key = run(
        shop, "release", "--task", "shop.pay", "--idempotency-key", "order-7", "--yes", "--json"
    )

    assert by_call.code == by_key.code == 0
    assert "Released 1 lock." in by_call.out
    assert by_key.json() == [{"matched": 1, "released": 1, "dry_run": False}]
    assert lookup("shop.rebuild", (1,), app=shop) is None
    assert lookup("shop.rebuild", (2,), app=shop) is not None
    assert lookup("shop.pay", idempotency_key="order-7", app=shop) is None


def test_release_of_all(shop, run):
    for number in range(3):
        shop.tasks["shop.rebuild"].delay(number)
    flush(shop)

    ran = run(shop, "release", "--all", "--yes")

    assert "Released 3 locks." in ran.out
    assert run(shop, "list", "--json").json() == []
    released = run(shop, "list", "--state", "released", "--json").json()
    assert len(released) == 3  # the tasks are there, and block nobody
    assert run(shop, "release", "--all", "--yes").code == 1
    assert lookup("shop.rebuild", (0,), app=shop) is None


def test_a_released_lock_is_told_as_such(local_app, run):
    @local_app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> None: ...

    rebuild.delay(1)
    flush(local_app)
    run(local_app, "release", "--all", "--yes")

    assert run(local_app, "list", "--json").json() == []
    asked_for = run(local_app, "list", "--state", "released", "--state", "live", "--json")
    assert [row["state"] for row in asked_for.json()] == ["released"]
    why = run(local_app, "why", "shop.rebuild", "--args", "[1]")
    assert why.code == 1
    assert "A call now is published: its key is free." in why.out
    assert "released manually" in why.out


# -- a word of its own, or an option -------------------------------------------------------------


@pytest.mark.parametrize(
    "named",
    [
        lambda result: [result.unique_key],
        lambda result: [result.unique_key[:14]],
        lambda result: [result.id],
        lambda result: ["--key", result.unique_key],
        lambda result: ["--task-id", result.id],
        lambda result: ["shop.rebuild", "--args", "[1]"],
        lambda result: ["--task", "shop.rebuild", "--args", "[1]"],
    ],
    ids=["key", "short key", "id", "--key", "--task-id", "call", "--task"],
)
def test_show_why_and_release_take_the_same_names(shop, run, named):
    result = shop.tasks["shop.rebuild"].delay(1)
    shop.tasks["shop.rebuild"].delay(2)
    flush(shop)

    for command in ("show", "why"):
        [told] = run(shop, command, "--json", *named(result)).json()
        assert [task["task_id"] for task in told["tasks"]] == [result.id]
    released = run(shop, "release", "--yes", *named(result))

    assert "Released 1 lock." in released.out
    assert lookup("shop.rebuild", (1,), app=shop) is None
    assert lookup("shop.rebuild", (2,), app=shop) is not None


def test_release_of_a_name_that_nothing_has_releases_nothing(shop, run):
    shop.tasks["shop.rebuild"].delay(1)
    flush(shop)

    for name in ("shop.rebuidl", "no-such-id", "1:00000000000000"):
        ran = run(shop, "release", name, "--yes")

        assert (ran.code, ran.out) == (1, "")
        assert "No lock matches." in ran.err


def test_release_of_a_part_of_several_keys_releases_nothing(shop, run):
    keys = ["1:" + "abcdef" + digit * 58 for digit in "01"]
    for key in keys:
        state_of(shop).store.acquire(key, Claim(f"id of {key}", "shop.rebuild", "pw", 60_000))

    ran = run(shop, "release", "1:abcdef", "--yes")

    assert ran.code == 2
    assert "means more than one key" in ran.err
    assert "Released 1 lock." in run(shop, "release", "1:abcdef0", "--yes").out


# -- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["list", "--state", "sleeping"], "'sleeping'"),
        (["list", "--older-than", "soon"], "give 10m, 1h30m, seconds (600) or ISO 8601 (PT10M)"),
        (["list", "--older-than", "nan"], "is not a duration"),
        (["list", "--key", "1:abc"], "is not a whole key"),
        (["list", "--task", "shop.rebuild", "--args", "{}"], "write an array such as"),
        (["list", "--task", "shop.rebuild", "--args", "[" * 100_000], "is not JSON"),
        (["list", "--task", "shop.rebuild", "--args", "[NaN]"], "shop_id"),
        (["list", "--args", "[1]"], "--task NAME"),
        (["list", "--key", "1:" + "0" * 64, "--idempotency-key", "k"], "give one of them"),
        (["list", "--idempotency-key", "k"], "belongs to its task"),
        (["why"], "Name a key"),
        (["why", "shop.pay", "--args", "[1]"], "shop.pay is not unique"),
        (["why", "shop.rebuild", "--args", "[1, 2, 3]"], "it takes 2 positional arguments, not 3"),
        (["why", "shop.pay", "--idempotency-key", ""], "1 to 255 characters"),
        (["why", "shop.pay", "--idempotency-key", "\udc80"], "idempotency_key"),
        (["why", "shop.pay", "--task-id", "x"], "give one of them"),
        (["show", "--key", "1:00", "--task-id", "x"], "give one of them"),
        (["release", "shop.pay", "--task", "shop.pay"], "give one of them"),
        (["release", "x", "--task-id", "x"], "give one of them"),
        (["release"], "--all"),
        (["nonsense"], "No such command"),
    ],
)  # fmt: skip
def test_wrong_use_is_told_with_exit_code_2(run, argv, said, request):
    app = make_app("memory://")

    @app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    @app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    ran = run(app, *argv)

    assert ran.code == 2, ran.err
    assert said in " ".join(ran.err.split())
    assert ran.out == ""


def test_an_app_that_does_not_know_the_library_is_told_so(run):
    ran = run(plain_app(), "list")

    assert ran.code == 2
    assert "celery_unique.install(app)" in ran.err


def test_locks_in_memory_are_said_to_be_those_of_this_process(run):
    assert "those of other processes are not visible here" in run(make_app("memory://"), "list").err


def test_manifest_is_the_functions(local_app, run):
    from celery_unique import manifest

    assert json.loads(run(local_app, "manifest").out) == manifest(local_app)
    assert run(local_app, "manifest", "--json").json() == [manifest(local_app)]


def test_main_returns_the_exit_code_and_shows_help(run, local_app):
    ran = run(local_app, "--help")

    assert ran.code == 0
    for command in ("list", "show", "why", "release", "stats", "doctor", "manifest"):
        assert f"  {command}  " in ran.out
        told = run(local_app, command, "--help")
        assert told.code == 0
        assert command == "manifest" or "celery -A shop unique" in told.out


# -- hostile content -----------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\nshop.fake  1:000  active\u202e\u2028\x00\x9b31m"


@pytest.mark.parametrize(
    "argv",
    [["list"], ["stats"], ["why", HOSTILE], ["show", HOSTILE], ["release", "--all", "--dry-run"]],
    ids=lambda argv: argv[0],
)
def test_no_content_can_break_what_is_printed(local_app, run, argv):
    local_app.send_task(HOSTILE, kwargs={"a": HOSTILE}, task_id=HOSTILE, unique=True)
    flush(local_app)

    for options in ([], ["--json"]):
        ran = run(local_app, *argv, *options)

        assert ran.code == 0
        assert all(line.isprintable() for line in ran.out.split("\n")), ran.out
        assert all(line.isprintable() for line in ran.err.split("\n")), ran.err
        if options and argv[0] != "release" and argv[0] != "stats":
            assert HOSTILE in json.dumps(ran.json(), ensure_ascii=False).encode().decode(
                "unicode_escape", "ignore"
            ) or any(HOSTILE in str(value) for row in ran.json() for value in _leaves(row))
    assert "\\x1b[2J" in run(local_app, "list").out


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def test_an_idempotency_key_can_be_read_from_the_standard_input(local_app, run, monkeypatch):
    import io

    @local_app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    key = "a key\x00 of lines\n and more"
    result = pay.apply_async((1,), idempotency_key=key)
    flush(local_app)
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))

    ran = run(local_app, "show", "shop.pay", "--idempotency-key-stdin", "--json")

    assert [task["task_id"] for task in ran.json()[0]["tasks"]] == [result.id]


# -- the entry point -----------------------------------------------------------------------------

IMPORTS = """
import sys, time
import click, celery.bin.celery
for name in [name for name in sys.modules if name.startswith("celery_unique")]:
    del sys.modules[name]
before = set(sys.modules)
began = time.process_time()
import celery_unique.cli
print((time.process_time() - began) * 1000)
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_every_celery_command_pays_next_to_nothing_for_it(report):
    outputs = [
        subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]

    took = min(float(lines[0]) for lines in outputs)
    report(f"importing the commands takes {took:.2f} ms over importing celery's own")
    assert set(outputs[0][1].split()) == {
        "celery_unique",
        "celery_unique.cli",
        "celery_unique.worker",
        "celery_unique.worker.remote_control",
    }
    assert took < 20


def test_celery_finds_the_commands_by_their_entry_point():
    from importlib.metadata import entry_points

    [point] = entry_points(group="celery.commands", name="unique")

    assert point.load() is unique
