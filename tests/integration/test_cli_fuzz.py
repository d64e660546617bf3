"""Ten thousand idempotency keys through the command line: none crashes it, none is another's."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import pytest
from celery import Celery

from celery_unique.cli import main
from tests.integration.apps import flush
from tests.integration.test_idempotency_key_fuzz import fuzzed_keys, shows

KEYS = 10_000
#: Every so many keys are also explained, listed and released, as a person would read it.
EVERY = 50


def run(app: Celery, *argv: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(app, argv, "celery unique")
    # Nothing that moves a cursor or ends a line, whatever the key.
    for text in (out.getvalue(), err.getvalue()):
        assert all(line.isprintable() for line in text.split("\n")), repr(text)
    return code, out.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_key_crashes_the_command_line_or_finds_anothers_lock(
    local_app: Celery, caplog: pytest.LogCaptureFixture, report: Callable[[str], None]
) -> None:
    @local_app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    caplog.set_level(logging.INFO)
    keys = fuzzed_keys(random.Random(20261116))
    ids: set[str] = set()
    longest = lines = 0
    for number in range(KEYS):
        key = next(keys)
        result = pay.apply_async((number,), idempotency_key=key)
        if number % 100 == 0:
            flush(local_app)
        caplog.clear()

        code, out = run(local_app, "show", "shop.pay", "--idempotency-key", key, "--json")

        assert code == 0, repr(key)
        told = json.loads(out)
        assert [task["task_id"] for task in told["tasks"]] == [result.id], repr(key)
        assert told["key"] == result.unique_key
        assert json.loads(told["made_from"])["type"] == "shop.pay"
        if number % EVERY == 0:
            check_one(local_app, key, result.id)
        ids.add(result.id)
        longest = max(longest, len(key))
        for record in caplog.records:
            lines += 1
            text = record.getMessage()
            assert not shows(text, key)
            assert result.unique_key.partition(":")[2][:16] not in text
    report(
        f"fuzzed idempotency keys through the command line: {KEYS} of up to {longest} characters, "
        f"{len(ids)} different tasks found, 0 errors, 0 keys in {lines} lines logged at INFO and "
        f"above; {KEYS // EVERY} also explained, listed and released"
    )
    assert len(ids) == KEYS
    assert longest == 255


def check_one(app: Celery, key: str, task_id: str) -> None:
    named = ("--task", "shop.pay", "--idempotency-key", key)
    code, out = run(app, "why", "shop.pay", "--idempotency-key", key)
    assert code == 0
    assert task_id in out
    code, out = run(app, "list", *named)
    assert code == 0
    assert task_id in out
    assert run(app, "release", *named, "--yes")[0] == 0
    assert run(app, "release", *named, "--yes")[0] == 1
