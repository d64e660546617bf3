"""As locks grow, in SQL databases: what ``growth`` measures on Redis, and what workers do besides.

A confirmation is a statement of its own there, which a thread executes after the call, so the
call is measured with and without it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import contenders, sql_rows
from benchmarks.contenders import OURS
from benchmarks.databases import DATABASES
from benchmarks.growth import KINDS, Filled, Kind, Kinds, figures, together
from benchmarks.measuring import Act, progress
from benchmarks.stage import Stage, store_of
from tests.support import ServerNotInstalled

#: Lapsed locks that one sweep deletes, and how many there are that it leaves. A sweep comes once
#: a minute: with more of them at once, rows deleted just before are most of what is measured.
SWEPT, LEFT = 3, 5_000


#: A batch there is as many statements: so many times smaller ones show the same, and sooner.
SMALLER = 10


def run(stage: Stage) -> dict[str, Any]:
    many, held = stage.sizes.growth_many, stage.sizes.growth_held
    smaller = {"growth_many": max(5, many // SMALLER), "growth_held": max(5, held // SMALLER)}
    stage = replace(stage, sizes=replace(stage.sizes, **smaller))
    stores = {}
    for name in DATABASES:
        try:
            stores[name] = _on(stage, name)
        except ServerNotInstalled as error:
            progress(f"{name} is left out: {error}")
            stage.missing.append(name)
    return {
        "locks": list(stage.sizes.growth_sql),
        "together": together(stage.sizes, SQL_KINDS),
        "stores": stores,
    }


def _on(stage: Stage, name: str) -> dict[str, Any]:
    with ExitStack() as stack:
        filled = [_filled(stage, stack, name, count) for count in stage.sizes.growth_sql]
        return {"figures": figures(stage, filled, SQL_KINDS)}


def _filled(stage: Stage, stack: ExitStack, name: str, count: int) -> Filled:
    url = stack.enter_context(DATABASES[name]())
    one = contenders.make(OURS, stage.redis.url(), url)
    store = store_of(one)
    stack.callback(store.close)
    store.create_tables()
    if count:
        progress(f"{name} with {count:,} locks")
        sql_rows.fill(store, count)
    catch_up = partial(sql_rows.catch_up, store)
    return Filled(count, one, store, stage.redis, url, store.flush, catch_up)


# -- what is measured besides ----------------------------------------------------------------


def _confirmed_call(stage: Stage, filled: Filled) -> Act:
    def act(_: int) -> None:
        filled.one.call(next(stage.numbers))
        filled.store.flush()

    return act


def _sweep(stage: Stage, filled: Filled) -> Act:
    sweeps = stage.sizes.growth_rounds * stage.sizes.growth_calls
    sql_rows.add_lapsed(filled.store, SWEPT * sweeps + LEFT)

    def act(_: int) -> None:
        if filled.store.sweep(SWEPT) != SWEPT:
            raise RuntimeError("there was less to sweep than was to be measured")

    return act


SQL_KINDS: Kinds = {
    **KINDS,
    "new call and its confirmation": Kind(_confirmed_call),
    f"sweep of {SWEPT} lapsed locks": Kind(_sweep),
}
