"""How a user with a type checker writes it: checked by mypy in strict mode, never run."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, assert_type

import celery_unique


def look_at(task: Any, app: Any) -> None:
    lock = celery_unique.lookup(task, (7,), app=app)
    if lock is not None:
        assert_type(lock.task_id, str)
        assert_type(lock.state, str)
        assert_type(lock.created_at, datetime)
        assert_type(lock.window_ends_at, datetime | None)
        assert_type(lock.duplicates, int)
        assert_type(lock.worker, str | None)
    assert_type(celery_unique.release(key="1:00"), bool)
    assert_type(celery_unique.apply_many([]), list[Any])


def ask(result: celery_unique.UniqueResult) -> None:
    assert_type(result.deduplicated, bool)
    assert_type(result.outcome, str)
    assert_type(result.unique_key, str | None)
    assert_type(result.holder_state, str | None)


def write_policies() -> None:
    policy = celery_unique.UniquePolicy(
        keys=["type", "args"], args_keys="shop_id", period="PT10M", states="window"
    )
    assert_type(policy.period, timedelta | None)
    assert_type(policy.states, tuple[str, ...])
    assert_type(policy.to_ojs(), dict[str, Any])
    assert_type(celery_unique.UniquePolicy.from_ojs({"keys": ["type"]}), celery_unique.UniquePolicy)


def hear(error: celery_unique.DuplicateTask) -> None:
    assert_type(error.task_id, str | None)
    assert_type(error.to_ojs(), dict[str, Any])
