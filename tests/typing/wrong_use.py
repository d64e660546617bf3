"""What type checkers refuse: each marked line, and no other. Never run.

ty (0.0.104) does not look at unknown names where the options are a mapping.
"""

from __future__ import annotations

from celery import Celery

import celery_unique
from celery_unique import UniquePolicy, UniqueTask, aio, shared_task

app = celery_unique.install(Celery("shop"))


@app.task(unique=True)
def rebuild_index(shop_id: int) -> str:
    return str(shop_id)


app.task(unique_on_conflict="rejct")  # wrong
app.task(unique=True, unique_fro="PT10M")  # wrong, but not for ty
app.task(unique=True, unique_states="until_dnoe")  # wrong
app.task(unique=True, unique_by=["argss"])  # wrong
app.task(unique=True, unique_on_conflict="queue", unique_limit="3")  # wrong
app.task(idempotency_key="order-7")  # wrong, but not for ty
shared_task(unique=True, unique_on_conflict="rejct")  # wrong
shared_task(unique=True, uniqe_on="shop_id")  # wrong, but not for ty
rebuild_index.apply_async((7,), unique_on_conflict="rejct")  # wrong
rebuild_index.apply_async((7,), unique_max_queue="many")  # wrong
rebuild_index.apply_async((7,), idempotency_kye="order-7")  # wrong, but not for ty
rebuild_index.apply_async((7,), idempotency_key=7)  # wrong
rebuild_index.s(7).set(unique_on_conflict="rejct")  # wrong
rebuild_index.delay("seven")  # wrong
rebuild_index.delay(7).get() + 1  # wrong
aio.delay(rebuild_index, "seven")  # wrong
UniquePolicy(on_conflict="rejct")  # wrong
UniquePolicy(identity_strategy="always")  # wrong
UniquePolicy(group=7)  # wrong
UniquePolicy("type")  # wrong
celery_unique.lookup(key=3)  # wrong
print(celery_unique.no_such_name)  # wrong


class Wrong(UniqueTask):
    unique_on_conflict = "rejct"  # wrong
