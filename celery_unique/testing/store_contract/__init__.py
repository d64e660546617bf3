# ruff: noqa: E402
"""Contract suite of lock stores: tests that every store must pass, on any server.

A test module of the store's package subclasses the contract and supplies a ``store`` fixture that
yields an empty store::

    import pytest
    from celery_unique.testing.store_contract import LockStoreContract

    class TestEtcdStore(LockStoreContract):
        @pytest.fixture
        def store(self):
            store = EtcdStore.from_url("etcd://localhost", namespace="", timeout_s=2.0)
            yield store
            store.close()

The tests move the clock through ``store.clock_offset_ms`` and never sleep: the store must add this
offset to its clock in every act. They call ``store.flush()`` after a fire-and-forget act. A key is
``1:`` and 64 hexadecimal digits. Each test uses a fresh key; only the tests of ``walk``, ``sweep``
and ``due`` need a store that holds nothing else.

The modules follow the acts of :class:`~celery_unique.stores.base.LockStore`. The ``*schedules``
play sequences of callers, workers and a broker, each of which fails if one rule of the protocol is
missing. The suite needs pytest and nothing else.
"""

from __future__ import annotations

import pkgutil

import pytest

# Before the modules are imported: their assertions are explained as those of a test module are.
pytest.register_assert_rewrite(
    *(name for _, name, _ in pkgutil.iter_modules(__path__, f"{__name__}."))
)

from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.acquire import AcquireContract
from celery_unique.testing.store_contract.cancel import CancelContract
from celery_unique.testing.store_contract.confirm import ConfirmContract
from celery_unique.testing.store_contract.factories import Key, fresh_key
from celery_unique.testing.store_contract.finish import FinishContract
from celery_unique.testing.store_contract.follower_schedules import FollowerScheduleContract
from celery_unique.testing.store_contract.followers import (
    CompleteContract,
    JoinContract,
    PromoteContract,
    ReapContract,
    SupersededContract,
)
from celery_unique.testing.store_contract.lanes import (
    CallContract,
    LaneFaultContract,
    LimitContract,
    ParkContract,
)
from celery_unique.testing.store_contract.merge import MergeContract
from celery_unique.testing.store_contract.read import ReadContract
from celery_unique.testing.store_contract.replace import ReplaceContract
from celery_unique.testing.store_contract.replace_schedules import ReplaceScheduleContract
from celery_unique.testing.store_contract.run import RunContract
from celery_unique.testing.store_contract.schedules import ScheduleContract

__all__ = ["LockStoreContract"]


class LockStoreContract(
    AcquireContract,
    ConfirmContract,
    CancelContract,
    RunContract,
    FinishContract,
    ReplaceContract,
    JoinContract,
    SupersededContract,
    CompleteContract,
    ReapContract,
    PromoteContract,
    ParkContract,
    CallContract,
    LaneFaultContract,
    LimitContract,
    MergeContract,
    ReadContract,
    ScheduleContract,
    ReplaceScheduleContract,
    FollowerScheduleContract,
):
    """The whole contract; the module's docstring shows how a store runs it."""

    @pytest.fixture
    def key(self, store: LockStore) -> Key:
        return Key(store, fresh_key())
