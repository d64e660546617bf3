from __future__ import annotations
import pytest
from celery_unique.stores import open_store
from tests.stores.contract.following import FollowingContract

class TestRedis(FollowingContract):
    @pytest.fixture
    def store(self, redis_url):
        s = open_store(redis_url)
        yield s
        s.close()
