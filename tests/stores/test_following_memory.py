"""Followers in the memory store."""

from __future__ import annotations

import pytest

from celery_unique.stores.memory import MemoryStore
from tests.stores.contract.following import FollowingContract


class TestMemory(FollowingContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
