"""The contract on every store of this package."""

from tests.stores.contract import LockStoreContract


class TestContract(LockStoreContract):
    """``store`` is the parametrised fixture of conftest.py."""
