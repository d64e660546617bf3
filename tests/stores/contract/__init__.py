"""What every lock store must do, as tests that anybody's store can run.

A store of your own runs them by subclassing, with a ``store`` fixture that yields
an empty store of yours::

    import pytest
    from tests.stores.contract import LockStoreContract

    class TestEtcdStore(LockStoreContract):
        @pytest.fixture
        def store(self):
            store = EtcdStore.from_url("etcd://localhost", namespace="", timeout_s=2.0)
            yield store
            store.close()

The tests move time through ``store.clock_offset_ms`` and never wait, so the store
must add that to its clock in every act. They call ``store.flush()`` after an act that
is one way. Keys look like ``1:`` and 64 hexadecimal digits. Each test uses one key
that no other test uses, but ``walk`` and ``sweep`` expect a store with nothing else in it.

The state machine (``test_state_machine.py``), the protocol's counterexamples
(``test_protocol_counterexamples.py``) and the races (``racing.py``) go on from here.
"""

from __future__ import annotations

import pytest

from tests.stores.contract.acquiring import AcquiringContract
from tests.stores.contract.ending import EndingContract
from tests.stores.contract.following import FollowingContract
from tests.stores.contract.publishing import PublishingContract
from tests.stores.contract.reading import ReadingContract
from tests.stores.contract.replacing import ReplacingContract
from tests.stores.contract.revoking import RevokingContract
from tests.stores.contract.running import RunningContract
from tests.stores.factories import fresh_key


class LockStoreContract(
    AcquiringContract,
    PublishingContract,
    RevokingContract,
    RunningContract,
    EndingContract,
    ReplacingContract,
    FollowingContract,
    ReadingContract,
):
    """The whole contract; see the module's docstring."""

    @pytest.fixture
    def key(self) -> str:
        return fresh_key()
