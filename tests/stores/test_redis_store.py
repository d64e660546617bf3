"""What is special to Redis: commands, layout, expiry, scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_unique.stores.redis import RedisStore, connections, scripts
from celery_unique.stores.redis.commands import BATCH
from celery_unique.stores.redis.layout import BUCKETS, Layout, bucket_of
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    claim,
    confirm,
    finish,
    fresh_key,
    publish,
    record_of,
    running,
    start,
    task_of,
)
from tests.stores.timing import PATIENCE_S
from tests.support import RedisServer

LUA = Path(scripts.__file__).parent / "lua"


@pytest.fixture(params=["redis_url", "valkey_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def store(url: str) -> Iterator[RedisStore]:
    with closing(RedisStore.from_url(url, timeout_s=PATIENCE_S)) as store:
        yield store


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as client:
        yield client


# -- round trips and keys -----------------------------------------------------


@contextmanager
def commands_seen(client: redis.Redis, *, of_scripts: bool = False) -> Iterator[list[str]]:
    """The names of the commands that clients send meanwhile, or only those of scripts: whole."""
    names: list[str] = []
    database = client.connection_pool.connection_kwargs["db"]
    with client.client() as bell, client.monitor() as monitor:
        bell.ping()
        while next(monitor.listen())["command"].upper() != "PING":
            pass  # what an earlier test still had on the way
        yield names
        bell.echo("that was all")
        for seen in monitor.listen():
            if "that was all" in seen["command"]:
                return
            if (seen["client_type"] == "lua") is of_scripts and int(seen["db"]) == database:
                name, command = seen["command"].split()[0].upper(), seen["command"]
                names.append(command if of_scripts else name)


@pytest.mark.server
def test_a_new_call_and_a_duplicate_are_one_command_each(store, client, key):
    store.acquire(fresh_key(), claim("warm"))

    with commands_seen(client) as new:
        store.acquire(key, claim("a"))
    with commands_seen(client) as duplicate:
        store.acquire(key, claim("b"))

    assert (new, duplicate) == (["EVALSHA"], ["EVALSHA"])


@pytest.mark.server
@pytest.mark.parametrize("behind_a_run", [False, True])
@pytest.mark.parametrize("delay_ms", [0, MINUTE])
def test_a_merged_call_costs_the_same_however_many_were_merged_before_it(
    store, client, key, behind_a_run, delay_ms
):
    def merged(number: int, **fields: Any) -> str:
        one = claim(f"call {number}", merge=f'{{"ids":[{number}]}}', delay_ms=delay_ms, **fields)
        return store.acquire(key, one).outcome

    if behind_a_run:
        publish(store, key, "running", merge='{"ids":[0]}')
        store.start(key, start("running", merge=True))
    publish(store, key, "a", merge='{"ids":[0]}', delay_ms=delay_ms)
    sent = []
    for number in range(1000):
        if number in (1, 500, 999):
            with commands_seen(client, of_scripts=True) as commands:
                assert merged(number) == "merged"
            sent.append(commands)
        else:
            assert merged(number) == "merged"

    if not delay_ms:  # else each call postpones the expiry, too
        assert [[each.split()[0].upper() for each in one] for one in sent] == [
            ["TIME", "HGETALL", "HGET", "HSET", "HGET", "HSET"]
        ] * 3
    for one in sent:
        assert len(one) <= 10
        assert sum(map(len, one)) < 4000


@pytest.mark.server
def test_to_revoke_a_parked_call_reads_no_other_however_many_are_parked(store, client):
    sent = []
    for parked in (3, 300):
        key = fresh_key()
        publish(store, key, "holder")
        for n in range(parked):
            store.acquire(key, claim(f"call {n}", on_conflict="queue", join=f"message {n}" * 20))
        with commands_seen(client, of_scripts=True) as commands:
            assert store.cancel(key, "call 1", MINUTE) == "cancelled"
            [orphan] = store.reap(key, "reaper", MINUTE)
            assert (orphan.follower_id, orphan.fate) == ("call 1", "revoked")
            assert store.followers(key, "holder") == []
            assert [one for one, _ in store.followers(key)] == ["call 1"]
            store.complete_follower(key, "call 1")
        assert len(store.parked(key)) == parked - 1
        whole = [each for each in commands if each.startswith(("HGETALL", "HSCAN"))]
        assert all(store._layout.names_of(key).followers not in each for each in whole)
        sent.append([each.split()[0] for each in commands])

    assert sent[0] == sent[1]


@pytest.mark.server
def test_followers_among_parked_calls_are_all_found(store, key):
    publish(store, key, "holder")
    for n in range(300):
        store.acquire(key, claim(f"call {n}", on_conflict="queue", join=f"message {n}" * 20))
        if n % 100 == 50:
            store.acquire(key, claim(f"follower {n}", join=f"message of {n}"))

    followers = [one for one, _ in store.followers(key, "holder")]

    assert followers == ["follower 50", "follower 150", "follower 250"]
    store.cancel(key, "holder", MINUTE)
    orphans = [one.follower_id for one in store.reap(key, "reaper", MINUTE)]
    assert orphans == ["call 0", *followers]


@pytest.mark.server
def test_start_and_finish_are_one_command_each(store, client, key):
    publish(store, key, "a")
    store.start(key, start("a"))
    store.finish(key, finish("a"))

    with commands_seen(client) as seen:
        publish(store, key, "b")
        store.start(key, start("b"))
        store.finish(key, finish("b"))

    assert seen == ["EVALSHA"] * 4  # acquire, start, finish, and confirm, which nobody waits for


@pytest.mark.server
def test_a_lock_is_one_key_for_all_its_life(store, client, key):
    publish(store, key, "a")
    waiting = client.dbsize()
    store.start(key, start("a"))
    active = client.dbsize()
    store.finish(key, finish("a"))

    assert (waiting, active, client.dbsize()) == (1, 1, 0)


@pytest.mark.server
def test_a_batch_is_pipelined_and_keeps_its_order(store, client):
    keys = [fresh_key() for _ in range(BATCH)]
    claims = [(key, claim(f"first {key}")) for key in keys]
    claims += [(key, claim(f"second {key}")) for key in keys]
    store.acquire(fresh_key(), claim("warm"))  # the server has the script

    with commands_seen(client) as seen:
        outcomes = store.acquire_many(claims)

    assert seen.count("EVALSHA") == 2 * BATCH
    assert [one.outcome for one in outcomes[:BATCH]] == ["created"] * BATCH
    assert [one.holder and one.holder.task_id for one in outcomes[BATCH:]] == [
        f"first {key}" for key in keys
    ]


@pytest.mark.server
def test_renewing_a_thousand_locks_is_one_stream_of_commands(store):
    keys = [fresh_key() for _ in range(1000)]
    store.acquire_many([(key, claim("a")) for key in keys])
    for key in keys[::2]:
        store.start(key, start("a"))

    renewed = store.renew([running(key, "a") for key in keys])

    assert renewed == [True, False] * 500


@pytest.mark.server
def test_looking_for_what_is_due_costs_the_same_among_no_locks_and_among_ten_thousand(
    store, client, key
):
    store.due()  # connects
    with commands_seen(client) as among_none:
        assert store.due() == []
    for _ in range(0, 10_000, BATCH):
        store.acquire_many([(fresh_key(), claim("a")) for _ in range(BATCH)])
    publish(store, key, "a")
    store.acquire(key, claim("b", join="its message"))
    store.cancel(key, "a", MINUTE)

    with commands_seen(client) as among_many:
        assert store.due() == [key]

    assert client.dbsize() > 10_000
    assert among_none == among_many == ["TIME", *["ZRANGE"] * BUCKETS]


# -- layout -------------------------------------------------------------------


@pytest.mark.server
def test_the_record_is_a_hash_under_the_bucket_of_its_key(store, client):
    store.acquire("1:ff00", claim("a"))

    assert client.keys() == [b"cu:{63}:1:ff00"]
    assert set(client.hgetall("cu:{63}:1:ff00")) == {b"t:a", b"n"}


@pytest.mark.parametrize("key", ["1:", "1:xyz", "user:7", "", "größe"])
def test_any_string_has_a_bucket(key):
    assert 0 <= bucket_of(key) < BUCKETS


@pytest.mark.server
def test_namespaces_and_prefixes_do_not_meet(url, key):
    places: list[dict[str, str]] = [
        {},
        {"namespace": "shop"},
        {"namespace": "shop:1"},
        {"namespace": "1"},
        {"key_prefix": "shop:"},
        {"key_prefix": "*"},
        {"key_prefix": "shop:", "namespace": "shop"},
    ]
    stores = [RedisStore.from_url(url, timeout_s=PATIENCE_S, **place) for place in places]

    outcomes = [store.acquire(key, claim(f"task {n}")) for n, store in enumerate(stores)]
    walked = [[(k, list(record.tasks)) for k, record in store.walk()] for store in stores]

    assert [each.outcome for each in outcomes] == ["created"] * len(stores)
    assert walked == [[(key, [f"task {n}"])] for n in range(len(stores))]
    assert len({store.fingerprint() for store in stores}) == len(stores)


@pytest.mark.server
def test_walk_tells_of_every_key_once(store, client):
    keys = sorted(fresh_key() for _ in range(700))
    store.acquire_many([(key, claim("a")) for key in keys])
    client.set("cu:not ours", "1")
    client.hset("other", "t:a", "[]")

    walked = [key for key, _ in store.walk(batch=10)]

    assert sorted(walked) == keys


@pytest.mark.server
def test_a_token_of_sixteen_digits_is_kept_to_the_last(store, key):
    publish(store, key, "a")

    started = store.start(key, start("a"))
    again = store.start(key, start("a"))

    assert started.token > 10**15
    assert again.token == started.token
    assert record_of(store, key).token == task_of(store, key, "a").token == started.token


@pytest.mark.server
def test_values_of_a_newer_release_survive_a_change(store, client, key):
    store.acquire(key, claim("a"))
    [name] = client.keys()
    packed = client.hget(name, "t:a").decode()
    longer = packed[:-1] + ',"",0,0,"",0,0,"",0,"","","","","",0,0,"new"]'
    client.hset(name, "t:a", longer)

    store.acquire(key, claim("b"))

    assert client.hget(name, "t:a").decode().endswith(',"new"]')
    assert task_of(store, key, "a").duplicates == 1


# -- expiry -------------------------------------------------------------------


@pytest.mark.server
def test_the_record_expires_with_its_latest_deadline(store, client, key):
    def left() -> float:
        [name] = client.keys()
        return client.pttl(name)

    store.acquire(key, claim("a"))
    pending = left()
    store.confirm(key, "a", QUEUE_LEASE)
    store.flush()
    waiting = left()
    store.start(key, start("a", lease_ms=RUN_LEASE))
    active = left()
    store.finish(key, finish("a", settle_later=True))
    store.settle(key, finish("a", mark_ms=3 * MINUTE), True)
    store.flush()
    marked = left()

    near = pytest.approx
    assert pending == near(GRACE, abs=5000)
    assert waiting == near(QUEUE_LEASE, abs=5000)
    assert active == near(RUN_LEASE, abs=5000)
    assert marked == near(3 * MINUTE, abs=5000)


@pytest.mark.server
def test_redis_itself_deletes_a_record_that_lapsed(store, client, key):
    store.acquire(key, claim("a", grace_ms=30))

    deadline = time.monotonic() + 20
    while client.dbsize() and time.monotonic() < deadline:
        time.sleep(0.01)

    assert client.dbsize() == 0
    assert store.acquire(key, claim("b")).outcome == "created"


@pytest.mark.server
@pytest.mark.parametrize("offset_ms", [90 * MINUTE, -90 * MINUTE])
def test_a_moved_clock_never_makes_a_record_vanish_early(store, client, key, offset_ms):
    store.clock_offset_ms = offset_ms

    store.acquire(key, claim("a"))

    [name] = client.keys()
    logically_left = task_of(store, key, "a").lease - store.read(key)[1]
    assert client.pttl(name) >= logically_left - 5000


# -- followers ----------------------------------------------------------------


@pytest.mark.server
def test_a_lock_that_nobody_follows_is_one_key_also_for_calls_that_would_join(store, client, key):
    publish(store, key, "a", join="its message")
    store.start(key, start("a"))
    store.acquire(key, claim("b"))

    assert len(client.keys()) == 1


@pytest.mark.server
def test_a_lock_with_followers_is_two_hashes_and_a_line_in_the_due_set_of_its_bucket(
    store, client, key
):
    publish(store, key, "a")
    store.acquire(key, claim("b", join="its message"))

    record, followers, due, _ = Layout("", "").names_of(key)
    names = {name.decode() for name in client.scan_iter()}
    [(member, _)] = client.zrange(due, 0, -1, withscores=True)
    assert names == {record, followers, due}
    assert len({name.partition("{")[2].partition("}")[0] for name in names}) == 1
    assert member.decode() == record
    assert client.pttl(followers) > 3 * 24 * 60 * MINUTE

    store.complete_follower(key, "b")

    assert [name.decode() for name in client.scan_iter()] == [record]


@pytest.mark.server
def test_looking_for_what_is_due_reads_no_more_where_more_keys_have_followers(store, client):
    def follow_in_every_bucket(number: int) -> None:
        for bucket in range(BUCKETS):
            key = f"1:{bucket:02x}{number:062x}"
            publish(store, key, "a")
            store.acquire(key, claim("b", join="its message"))

    def bytes_read() -> int:
        before = client.info("stats")["total_net_output_bytes"]
        assert store.due() == []
        return int(client.info("stats")["total_net_output_bytes"] - before)

    follow_in_every_bucket(1)
    with_one = bytes_read()
    for number in range(2, 6):
        follow_in_every_bucket(number)

    # What INFO itself says of the server is a few bytes more or less each time.
    assert bytes_read() < 1.2 * with_one


@pytest.mark.server
def test_what_is_due_is_found_in_every_bucket_those_that_wait_longest_first(store):
    keys = [f"1:{bucket:02x}{number:062x}" for number in range(2) for bucket in (7, 3, 60)]
    for n, key in enumerate(keys):
        store.acquire(key, claim("a"))
        confirm(store, key, "a", lease_ms=MINUTE + 1000 * n)
        store.acquire(key, claim("b", join="its message"))
    assert store.due() == []

    store.clock_offset_ms = 2 * MINUTE

    assert store.due() == keys
    assert store.due(limit=4) == keys[:4]


@pytest.mark.server
def test_followers_that_the_server_threw_away_are_not_due_for_ever(store, client, key):
    publish(store, key, "a")
    store.acquire(key, claim("b", join="its message"))
    store.cancel(key, "a", MINUTE)
    client.delete(Layout("", "").names_of(key).followers)
    assert store.due() == [key]

    assert store.reap(key, "worker", MINUTE) == []

    assert store.due() == []
    assert record_of(store, key).following is None


# -- scripts ------------------------------------------------------------------


def numbered(described: str) -> list[str]:
    """Of "6 window or 0, 7 time to the ETA": a number behind a comma, a semicolon or a colon."""
    return re.findall(r"(?:^|[,;:])[\s-]+(\d+) ", described)


def test_every_script_begins_with_its_contract_and_touches_the_keys_it_is_given():
    acts, includes = list(LUA.glob("*.lua")), list(LUA.glob("include/*.lua"))
    for path in (*acts, *includes):
        text = path.read_text()
        assert text.startswith(f"-- {path.stem}: "), path
        touched = set(re.findall(r"KEYS\[(.*?)\]", text))
        headings = ("KEYS     ", "ARGV     ", "Returns  ") if path in acts else ("Defines  ",)
        for heading in headings:
            assert f"-- {heading}" in text, (path, heading)
        # Those that its contract lists; of an include, those that every act is given.
        given = re.findall(r"(?s)-- KEYS  (.*?)-- ARGV", text)
        listed = [int(number) for each in given for number in numbered(each)]
        assert listed == list(range(1, len(listed) + 1)), path
        assert touched <= ({f"{n}" for n in listed} if path in acts else set("1234")), path
    assert {script.stem.upper() for script in acts} == {
        name for name, script in vars(scripts).items() if isinstance(script, scripts.Script)
    }


def test_every_script_names_its_arguments_before_it_includes_anything():
    for path in LUA.glob("include/*.lua"):
        assert "ARGV" not in path.read_text(), path
    for path in LUA.glob("*.lua"):
        beginning, _, rest = path.read_text().partition("-- @include ")
        header, _, named = beginning.partition("\nlocal ")
        numbers = [int(number) for number in re.findall(r"ARGV\[(\d+)\]", named)]
        assert numbers == list(range(1, len(numbers) + 1)), path
        [described] = re.findall(r"(?s)-- ARGV(.*?)-- Returns", header)
        assert [int(number) for number in numbered(described)] == numbers, path
        assert "ARGV" not in rest, path


@pytest.mark.server
def test_a_script_flush_is_survived(store, client, key):
    publish(store, key, "a")
    client.script_flush()

    duplicate = store.acquire(key, claim("b"))
    client.script_flush()
    started = store.start(key, start("a"))
    client.script_flush()
    renewed = store.renew([running(key, "a")] * 3)

    assert duplicate.outcome == "duplicate"
    assert started.verdict == "run"
    assert renewed == [True] * 3


@pytest.mark.server
def test_commands_are_the_same_without_hiredis(store, key, monkeypatch):
    monkeypatch.setattr(connections, "pack_command", None)

    publish(store, key, "größe 1")
    store.acquire_many([(key, claim("b")), (fresh_key(), claim("c"))])
    store.flush()

    assert task_of(store, key, "größe 1").duplicates == 1


@pytest.mark.server
def test_one_way_acts_survive_a_script_flush(store, client, key):
    publish(store, fresh_key(), "warm")
    store.acquire(key, claim("a"))
    client.script_flush()

    store.confirm(key, "a", QUEUE_LEASE)
    store.flush()
    confirmed = task_of(store, key, "a").state
    store.start(key, start("a"))
    client.script_flush()
    store.retry(key, "a", "d1", QUEUE_LEASE, False)
    store.flush()
    retried = task_of(store, key, "a").state

    assert (confirmed, retried) == ("w", "t")


def test_a_walk_stops_in_time_among_the_keys_of_others(start_server):
    server = start_server(RedisServer)
    patient = RedisStore.from_url(server.url, timeout_s=PATIENCE_S)
    with closing(patient) as store, server.client() as client:
        client.mset({f"other:{number}": 1 for number in range(5000)})
        store.acquire(fresh_key(), claim("t1"))

        def scans(**options: float) -> int:
            client.config_resetstat()
            list(store.walk(batch=100, **options))
            return int(client.info("commandstats")["cmdstat_scan"]["calls"])

        assert scans() > 40
        assert scans(stop_at=0.0) == 1


# -- eviction ----------------------------------------------------------------------


@pytest.mark.server
def test_a_task_whose_payload_was_evicted_takes_no_more_values(store, client):
    """It would run with those alone, and not with the ones in its message."""
    key = fresh_key()
    publish(store, key, "holder", merge='{"numbers": [1]}')
    [payload] = client.keys(f"*}}p:{key}")
    client.delete(payload)

    later = store.acquire(key, claim("later", merge='{"numbers": [2]}'))

    assert later.outcome == "created"
    assert store.start(key, start("holder", merge=True)).payload == ""
