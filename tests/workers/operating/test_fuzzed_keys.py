"""Idempotency keys that somebody might send, on the command line of a real process."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.test_idempotency_key_fuzz import INJECTIONS, fuzzed_keys
from tests.workers.operating.desk import Desk, Done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FUZZED = 4


def test_no_key_breaks_the_command(desk):
    more = fuzzed_keys(random.Random(7))
    # The arguments of a process can have no NUL: such a key comes by the standard input.
    keys = [key for key in INJECTIONS if "\0" not in key]
    fuzzed = (next(more) for _ in range(200))
    keys += [key for key in fuzzed if "\0" not in key and key not in INJECTIONS][:FUZZED]
    keys.append("nul \0 in it")
    send = desk.app.send_task
    ids = {
        key: send("shop.pay", kwargs={"amount": n}, idempotency_key=key).id
        for n, key in enumerate(keys)
    }
    desk.store.flush()

    with ThreadPoolExecutor(2) as pool:
        told = dict(zip(keys, pool.map(lambda key: show(desk, key), keys), strict=True))

    for key, done in told.items():
        assert done.code == 0, (key, done.err)
        assert [task["task_id"] for task in done.json()["tasks"]] == [ids[key]], repr(key)
        assert not done.err
    assert len(set(ids.values())) == len(keys) >= 22


def show(desk: Desk, key: str) -> Done:
    if "\0" in key:
        return desk.unique(
            "show", "shop.pay", "--idempotency-key-stdin", "--json", stdin=f"{key}\n"
        )
    return desk.unique("show", "shop.pay", "--json", f"--idempotency-key={key}")
