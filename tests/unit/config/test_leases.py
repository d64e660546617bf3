"""How long locks last, from the settings and from what the broker does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_unique.config.leases import Leases
from celery_unique.config.settings import UniqueSettings


def leases(broker: str | None, **options: Any) -> Leases:
    app = Celery("leases", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = options
    return Leases.of(UniqueSettings(queue_lease=timedelta(minutes=10)), app.conf)


def test_a_queue_lease_is_never_below_the_time_after_which_redis_delivers_again():
    assert leases("redis://localhost").queue_ms == (3600 + 400) * 1000
    assert leases("redis://localhost", visibility_timeout=1000).queue_ms == 1_400_000


@pytest.mark.parametrize("broker", ["amqp://localhost", "amqps://localhost", "pyamqp://a;amqp://b"])
def test_a_queue_lease_is_as_set_where_messages_do_not_come_back_after_a_time(broker):
    assert leases(broker).queue_ms == 600_000


def test_a_visibility_timeout_that_is_set_counts_with_any_broker():
    assert leases("memory://", visibility_timeout=7200).queue_ms == 7_600_000
