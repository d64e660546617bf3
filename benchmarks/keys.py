"""What computing a key takes, against ``json.dumps`` of the same arguments."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kombu.utils.json import dumps as kombu_dumps

from benchmarks.measuring import interleaved, median, summary
from benchmarks.stage import Stage
from celery_unique.config.settings import UniqueSettings
from celery_unique.keys.call import Call
from celery_unique.keys.identity import identify
from celery_unique.policy.policy import UniquePolicy

#: One sample is this many keys: a clock is read in about a tenth of a microsecond.
LOOP = 50

TYPICAL = {
    "id": 91823,
    "customer": {"name": "Ada Lovelace", "mail": "ada@example.org"},
    "lines": [{"sku": "A-1", "n": 2, "price": 9.5}, {"sku": "B-7", "n": 1, "price": 120}],
    "express": True,
    "note": None,
    "tags": ["a", "b"],
}
RICH = {
    "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "id": uuid.UUID(int=7),
    "amount": Decimal("12.50"),
    "name": "Zo\u00eb",
    "raw": b"\x00\x01",
}
LARGE = {
    "rows": [{"id": n, "name": f"row {n}", "score": n / 7, "ok": n % 2 == 0} for n in range(145)]
}


def rebuild(shop_id: int, full: bool = False, tag: str = "") -> None: ...


def ship(order: Any, options: Any = None) -> None: ...


CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "three small arguments": (rebuild, (7, True, "nightly")),
    "typical, nested, 200 bytes": (ship, (TYPICAL,)),
    "rich types": (ship, (RICH,)),
    "10 kB": (ship, (LARGE,)),
}


def run(stage: Stage) -> dict[str, Any]:
    return {name: _case(stage, *case) for name, case in CASES.items()}


def _case(stage: Stage, function: Callable[..., None], args: tuple[Any, ...]) -> dict[str, Any]:
    call = Call("shop.tasks.rebuild_index", args, {}, inspect.signature(function))
    policy, settings = UniquePolicy(), UniqueSettings()
    # json itself knows no dates: what Celery would send them with.
    is_plain = function is rebuild or args[0] is not RICH
    dumps = json.dumps if is_plain else kombu_dumps

    def key(_: int) -> None:
        for _ in range(LOOP):
            identify(call, policy, settings.key_secret, settings.idempotency_scope)

    def as_json(_: int) -> None:
        for _ in range(LOOP):
            dumps(args)

    samples = interleaved(max(5, stage.sizes.rounds // 2), {"key": key, "json": as_json})
    one = {name: [took / LOOP for took in times] for name, times in samples.items()}
    return {
        "key": summary(one["key"]),
        "json_dumps": summary(one["json"]),
        "bytes": len(kombu_dumps(args)),
        "times_json_dumps": round(median(one["key"]) / median(one["json"]), 2),
    }
