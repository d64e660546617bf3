"""Ten thousand idempotency keys through the command line: none crashes it, none is another's."""

from __future__ import annotations

import inspect
import io
import json
import logging
import random
from contextlib import redirect_stderr, redirect_stdout

import pytest
from celery import Celery

from celery_unique import UniquePolicy
from celery_unique.cli import main
from celery_unique.config.app_state import state_of
from celery_unique.keys.call import Call
from celery_unique.keys.identity import identify
from celery_unique.stores.base import Claim
from tests.integration.test_idempotency_key_fuzz import fuzzed_keys, shows

KEYS = 10_000
#: Every so many keys are also explained, shown and released, as a person would read it.
EVERY = 50
HOUR_MS = 3_600_000
SIGNATURE = inspect.signature(lambda amount: None)


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
def test_no_key_crashes_the_command_line_or_finds_anothers_lock(local_app, caplog, report):
    @local_app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    store, settings = state_of(local_app).store, state_of(local_app).settings
    caplog.set_level(logging.INFO)
    keys = fuzzed_keys(random.Random(20261116))
    ids: set[str] = set()
    longest = lines = 0
    for number in range(KEYS):
        key = next(keys)
        task_id = f"task-{number}"
        # As a call does it, without the message: the tests of callers have that.
        identity = identify(
            Call("shop.pay", (number,), idempotency_key=key, signature=SIGNATURE),
            UniquePolicy(),
            settings.key_secret,
            settings.idempotency_scope,
        )
        claim = Claim(task_id, "shop.pay", "pswrtc", HOUR_MS, arguments=identity.arguments)
        assert store.acquire(identity.key, claim).outcome == "created", repr(key)
        caplog.clear()

        named = ("--task", "shop.pay", "--idempotency-key", key)
        code, out = run(local_app, "list", "--json", *named)

        assert code == 0, repr(key)
        told = json.loads(out)
        assert told["task_id"] == task_id, repr(key)
        assert told["key"] == identity.key
        if number % EVERY == 0:
            check_one(local_app, key, task_id)
        ids.add(task_id)
        longest = max(longest, len(key))
        for record in caplog.records:
            lines += 1
            text = record.getMessage()
            assert not shows(text, key)
            assert identity.key.partition(":")[2][:16] not in text
    report(
        f"fuzzed idempotency keys through the command line: {KEYS} of up to {longest} characters, "
        f"{len(ids)} different tasks found, 0 errors, 0 keys in {lines} lines logged at INFO and "
        f"above; {KEYS // EVERY} also explained, shown and released"
    )
    assert len(ids) == KEYS
    assert longest == 255


def check_one(app: Celery, key: str, task_id: str) -> None:
    named = ("--task", "shop.pay", "--idempotency-key", key)
    code, out = run(app, "why", "shop.pay", "--idempotency-key", key)
    assert code == 0
    assert task_id in out
    code, out = run(app, "show", "shop.pay", "--idempotency-key", key)
    assert code == 0
    assert task_id in out
    assert run(app, "release", *named, "--yes")[0] == 0
    assert run(app, "release", *named, "--yes")[0] == 1
