"""How a user with a type checker writes it: every checker accepts it. Never run."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Unpack, assert_type

from celery import Celery

import celery_unique
from celery_unique import CallOptions, UniqueResult, UniqueTask, aio, shared_task

app = celery_unique.install(Celery("shop"), run_lease="PT30S")


@app.task(unique=True)
def rebuild_index(shop_id: int, full: bool = False) -> str:
    return f"{shop_id} {full}"


@app.task(
    unique=True,
    unique_for="PT10M",
    unique_on=["shop_id"],
    unique_by=["type", "queue", "args", "meta"],
    unique_meta="tenant",
    unique_states="until_success",
    unique_on_conflict="replace",
    unique_max_wait=timedelta(hours=1),
    identity_strategy="strict",
    unique_guard=True,
    unique_label="{shop_id}",
    name="shop.reindex",
    max_retries=3,
    acks_late=True,
)
def reindex(shop_id: int, reason: str) -> None: ...


@app.task(
    unique=True,
    unique_group="user:{user_id}",
    unique_on_conflict="queue",
    unique_limit=3,
    unique_max_queue=100,
)
def sync_account(user_id: int) -> None: ...


sync_account.apply_async((7,), unique_limit=2, unique_max_queue=None)


@app.task(
    unique=True,
    unique_on_conflict="merge",
    unique_merge=["doc_ids"],
    unique_merge_max_bytes=100_000,
    unique_max_wait=60,
)
def index(shop_id: int, doc_ids: list[int]) -> int:
    return len(doc_ids)


@app.task(unique={"keys": ["type"], "on_conflict": "ignore"})
def sweep() -> int:
    return 1


@shared_task(unique=True, unique_key="{user_id}", unique_states=["pending", "available"])
def greet(user_id: int) -> None: ...


@shared_task(bind=True, unique=celery_unique.UniquePolicy(period=60.0), ignore_result=True)
def pay(self: UniqueTask, account: str) -> int:
    lock = self.request.unique
    if lock is not None and lock.still_mine():
        return lock.token
    raise self.retry(countdown=5)


@app.task(base=UniqueTask, unique=True, unique_key=str)
def count(shelf: int) -> int:
    return shelf


class Weigh(UniqueTask[[int], float]):
    name = "shop.weigh"
    unique = True
    unique_on_conflict = "reject"

    def run(self, shelf: int) -> float:
        return float(shelf)


@shared_task
def plain(name: str) -> str:
    return name


@app.task(
    unique=True,
    acks_late=True,
    acks_on_failure=False,
    acks_on_timeout=None,
    reject_on_worker_lost=True,
    retry_on_worker_lost=True,
)
def settle(account: str) -> None: ...


own = Celery("own")
own = celery_unique.install(own)


@own.task(unique=True)
def weigh(shelf: int) -> float:
    return float(shelf)


def call(**options: Unpack[CallOptions]) -> None:
    assert_type(rebuild_index(7), str)
    result = rebuild_index.delay(7, full=True)
    assert_type(result, UniqueResult[str])
    assert_type(result.get(timeout=3), str)
    assert_type(result.id, str)
    assert_type(result.deduplicated, bool)
    if result.outcome == "deduplicated":
        assert_type(result.holder_state, str | None)
    assert_type(rebuild_index.apply((7,)).get(), str)
    assert_type(weigh.delay(7).deduplicated, bool)
    pay.apply_async(("a-1",), idempotency_key="order-7", idempotency_ttl="P1D", countdown=60)
    pay.apply_async(("a-1",), idempotency_key="order-7", idempotency_scope="run")
    reindex.apply_async(kwargs={"shop_id": 7}, unique=False, queue="bulk", task_id="t-1")
    greet.apply_async((7,), unique_for=30, unique_on_conflict="rerun", expires=90)
    sweep.apply_async(**options)
    count.apply_async((4,), idempotency_key="shelf-4")
    app.send_task("other.task", (1,), unique=True, unique_on_conflict="reject")
    assert_type(pay.delay("a-1"), UniqueResult[int])


async def await_calls() -> None:
    assert_type(await aio.delay(rebuild_index, 7, full=True), UniqueResult[str])
    print((await aio.apply_async(pay, ("a",), idempotency_key="order-7")).outcome)
    assert_type(await aio.lookup(rebuild_index, (7,)), celery_unique.Lock | None)
    assert_type(await aio.release(key="1:00"), bool)
    assert_type(await aio.apply_many([rebuild_index.s(7)]), list[Any])


def apply_many(shops: list[int]) -> list[Any]:
    signatures = [rebuild_index.s(shop).set(idempotency_key=f"shop-{shop}") for shop in shops]
    signatures.append(rebuild_index.si(7, full=True))
    return celery_unique.apply_many(signatures)


def inspect(task: UniqueTask[..., Any], old: Celery) -> None:
    lock = celery_unique.lookup(task, (7,), app=old)
    if lock is not None:
        assert_type(lock.task_id, str)
        assert_type(lock.created_at, datetime)
        assert_type(lock.window_ends_at, datetime | None)
        assert_type(lock.worker, str | None)
    assert_type(celery_unique.release(key="1:00"), bool)


def bare(result: UniqueResult, error: celery_unique.DuplicateTask) -> None:
    assert_type(result.unique_key, str | None)
    assert_type(error.task_id, str | None)
    assert_type(error.to_ojs(), dict[str, Any])
    policy = celery_unique.UniquePolicy(keys=["type", "args"], args_keys="shop_id", states="window")
    assert_type(policy.period, timedelta | None)
    assert_type(policy.states, tuple[str, ...])
    assert_type(celery_unique.UniquePolicy.from_ojs({"keys": ["type"]}), celery_unique.UniquePolicy)
