"""Records that no release of this library has written, put into a real store under a key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import redis

from celery_unique.stores.redis import RedisStore
from celery_unique.stores.sql import SqlStore

#: Under a key with one task, ``task_id``, whose record it replaces.
Break = Callable[[Any, str, str], None]

NOW = 1_900_000_000_000
FAR = 99_999_999_999

#: Values of a task, in place of [version, state, created at, lease, name, ...].
TASKS: Mapping[str, Any] = {
    "not JSON": "not JSON",
    "half of it": '[1,"w",190000',
    "a number": "7",
    "null": "null",
    "a text": '"w"',
    "a mapping": "{}",
    "an empty list": "[]",
    "too short": '[1,"w"]',
    "a state that does not exist": f'[1,"q",{NOW},{FAR}]',
    "a state that is a number": f"[1,5,{NOW},{FAR}]",
    "a creation that is a text": f'[1,"w","yesterday",{FAR}]',
    "a creation that is null": f'[1,"w",null,{FAR}]',
    "a lease that is a text": f'[1,"w",{NOW},"long"]',
    "a lease that is a list": f'[1,"w",{NOW},[1]]',
    "a lease below zero": f'[1,"w",{NOW},-5]',
    "a name that is a mapping": f'[1,"w",{NOW},{FAR},{{"a":1}}]',
    "an ETA that is a text": f'[1,"w",{NOW},{FAR},"shop",0,"soon"]',
    "keep that is null": f'[1,"w",{NOW},{FAR},"shop",0,0,null]',
    "a delivery that is a number": f'[1,"r",{NOW},{FAR},"shop",0,0,"",0,0,5,{FAR}]',
    "a token that is a word": f'[1,"r",{NOW},{FAR},"shop",0,0,"",0,0,"d",{FAR},"first"]',
    "flags that are a list": f'[1,"r",{NOW},{FAR},"shop",0,0,"",0,0,"d",{FAR},"1",[]]',
    "nested": "[" * 500 + "]" * 500,
    "bytes": b"\xff\xfe\x00",
}


def _in_redis(change: Callable[[Any, Any, str], None]) -> Break:
    def break_(store: RedisStore, key: str, task_id: str) -> None:
        store.flush()
        with redis.Redis(**_address(store)) as client:
            change(client, store._layout.names_of(key), task_id)

    return break_


def _address(store: RedisStore) -> dict[str, Any]:
    options = store._connections.address.options
    return {name: options[name] for name in ("host", "port", "db") if name in options}


def _field(name: str, value: Any) -> Break:
    return _in_redis(
        lambda client, names, task_id: client.hset(names.record, name or f"t:{task_id}", value)
    )


def _another_type(client: Any, names: Any, task_id: str) -> None:
    client.delete(names.record)
    client.set(names.record, "something else")


def _a_list(client: Any, names: Any, task_id: str) -> None:
    client.delete(names.record)
    client.rpush(names.record, "something else")


def _followers_of_another_type(client: Any, names: Any, task_id: str) -> None:
    client.set(names.followers, "something else")
    client.hset(names.record, "f", json.dumps({"d": 1, "r": "", "u": 0, "g": {}, "p": {}}))


IN_REDIS: Mapping[str, Break] = {
    **{f"a task: {variant}": _field("", value) for variant, value in TASKS.items()},
    "a text under its name": _in_redis(_another_type),
    "a list under its name": _in_redis(_a_list),
    "a token that is a word": _field("token", "first"),
    "a mark that is not JSON": _field("m:x", "not JSON"),
    "a mark that is a number": _field("m:x", "7"),
    "a mark without an end": _field("m:x", '["done"]'),
    "a foreign field": _field("colour", "blue"),
    "a name that is no text": _field("n", b"\xff\xfe"),
    "followers: not JSON": _field("f", "not JSON"),
    "followers: a number": _field("f", "7"),
    "followers: nothing of it": _field("f", "{}"),
    "followers of another type": _in_redis(_followers_of_another_type),
}


def _row(column: str, value: Any) -> Break:
    def break_(store: SqlStore, key: str, task_id: str) -> None:
        store.flush()
        table = store._statements._table
        with store._database._engine.connect() as connection:
            connection.exec_driver_sql(
                f"UPDATE {table} SET {column} = {_literal(value)} WHERE lock_key = '{key}'"
            )
            if connection.in_transaction():
                connection.commit()

    return break_


def _literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    escaped = str(value).replace("'", "''").replace("%", "%%")
    return f"'{escaped}'"


def _task_row(value: Any) -> Break:
    def break_(store: SqlStore, key: str, task_id: str) -> None:
        _row("record", f'{{"t":{{{json.dumps(task_id)}:{value}}}}}')(store, key, task_id)

    return break_


IN_SQL: Mapping[str, Break] = {
    **{
        f"a task: {variant}": _task_row(value)
        for variant, value in TASKS.items()
        if isinstance(value, str)
    },
    "empty": _row("record", ""),
    "null": _row("record", "null"),
    "a list": _row("record", "[]"),
    "no tasks": _row("record", "{}"),
    "tasks that are a list": _row("record", '{"t":[]}'),
    "tasks that are null": _row("record", '{"t":null}'),
    "marks that are a list": _row("record", '{"t":{},"m":[1]}'),
    "a mark that is null": _row("record", '{"t":{},"m":{"x":null}}'),
    "followers that are a number": _row("record", '{"t":{},"f":7}'),
    "followers without groups": _row("record", '{"t":{},"f":{"d":1,"r":"","u":0}}'),
}
#: SQLite keeps any value in any column.
IN_SQLITE: Mapping[str, Break] = {
    **IN_SQL,
    "bytes": _row("record", b"\xff\xfe"),
    "a token that is a word": _row("token", "first"),
    "conflicts that are a word": _row("conflicts", "many"),
    "a revision that is a word": _row("revision", "first"),
    "a state that is bytes": _row("holder_state", b"\xff"),
    "a time that is a word": _row("holder_until", "later"),
}


def variants_for(store: Any) -> Mapping[str, Break]:
    if isinstance(store, RedisStore):
        return IN_REDIS
    return IN_SQLITE if store._options.url.get_backend_name() == "sqlite" else IN_SQL
