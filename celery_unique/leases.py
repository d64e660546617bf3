"""How long things last, in milliseconds, from the settings and Celery's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .settings import UniqueSettings

#: Redis redelivers up to this much after the visibility timeout: kombu looks for
#: unacknowledged messages every 100 s, and a worker that is killed while it looks keeps
#: the others from looking for another 300.
RESTORE_MARGIN_S = 400
#: Celery's own default for brokers that redeliver by time.
DEFAULT_VISIBILITY_TIMEOUT_S = 3600
#: How URLs of brokers begin that speak AMQP.
AMQP = ("amqp:", "amqps:", "pyamqp:", "pyamqps:")


def milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))


@dataclass(frozen=True, slots=True)
class Leases:
    queue_ms: int
    run_ms: int
    grace_ms: int
    retention_ms: int
    visibility_ms: int

    @classmethod
    def of(cls, settings: UniqueSettings, conf: Any) -> Leases:
        visibility_ms = _visibility_timeout_ms(conf)
        return cls(
            # A message that the broker may still redeliver must find its key taken.
            queue_ms=max(
                milliseconds(settings.queue_lease),
                visibility_ms + RESTORE_MARGIN_S * 1000 if _redelivers_by_time(conf) else 0,
            ),
            run_ms=milliseconds(settings.run_lease),
            grace_ms=max(
                milliseconds(settings.publish_grace),
                publish_retry_ms(conf.task_publish_retry_policy, conf),
            ),
            retention_ms=milliseconds(settings.retention),
            visibility_ms=visibility_ms,
        )

    def waiting_ms(self, delay_ms: int, expires_ms: int | None) -> int:
        """The lease of a waiting message, counted from its ETA; ``expires`` bounds it."""
        if expires_ms is None:
            return self.queue_ms
        return max(1, min(self.queue_ms, expires_ms - delay_ms))


def _visibility_timeout_ms(conf: Any) -> int:
    options = conf.broker_transport_options or {}
    seconds = options.get("visibility_timeout", DEFAULT_VISIBILITY_TIMEOUT_S)
    return round(float(seconds) * 1000)


def _redelivers_by_time(conf: Any) -> bool:
    """RabbitMQ gives a message to another worker when its own is gone, however long it took."""
    if "visibility_timeout" in (conf.broker_transport_options or {}):
        return True
    return not str(conf.broker_write_url).startswith(AMQP)


def publish_retry_ms(policy: Mapping[str, Any] | None, conf: Any) -> int:
    """The longest that Celery goes on trying to publish one message.

    A policy that retries for ever has no such bound: then the grace is an hour,
    and the lock of a publisher that is still trying after that may go to another.
    """
    policy = policy or {}
    retries = policy.get("max_retries", 3)
    if retries is None:
        return 3_600_000
    pauses: float = retries * float(policy.get("interval_max", 0.2) or 0)
    connecting = (retries + 1) * float(conf.broker_connection_timeout or 4)
    return int((pauses + connecting) * 1000)
