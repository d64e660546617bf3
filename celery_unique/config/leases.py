"""Leases of an app, and the times of a message, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_make_aware

from celery_unique.policy.durations import milliseconds

from .settings import UniqueSettings

#: The last moment that every time zone can show: a lease may end after the year 9999.
LAST_MOMENT = datetime(9999, 12, 31, tzinfo=UTC)
_LAST_MS = int(LAST_MOMENT.timestamp() * 1000)


def moment_of(milliseconds: int) -> datetime:
    """A time of a store's clock as a datetime, at most the last moment."""
    if milliseconds >= _LAST_MS:
        return LAST_MOMENT
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def delay_ms(app: Any, options: Mapping[str, Any]) -> int:
    """The time to the ETA; 0 where there is none or it has passed."""
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown:
        return max(0, round(float(countdown) * 1000))
    return max(0, _from_now_ms(app, eta)) if eta else 0


def expires_ms(app: Any, options: Mapping[str, Any]) -> int | None:
    """The time to the message's end; None where it has none."""
    expires = options.get("expires")
    if expires is None:
        return None
    if isinstance(expires, (int, float)):
        return max(1, round(expires * 1000))
    return max(1, _from_now_ms(app, expires))


def _from_now_ms(app: Any, moment: Any) -> int:
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    moment = maybe_make_aware(moment, app.timezone)
    return int((moment - app.now()).total_seconds() * 1000)


#: Redis redelivers up to this long after the visibility timeout: kombu looks for unacknowledged
#: messages every 100 s, and a worker that is killed meanwhile blocks the others for another 300.
RESTORE_MARGIN_S = 400
#: Celery's own default for brokers that redeliver by time.
DEFAULT_VISIBILITY_TIMEOUT_S = 3600
#: Schemes of brokers that speak AMQP.
AMQP = ("amqp:", "amqps:", "pyamqp:", "pyamqps:")


@dataclass(frozen=True, slots=True)
class Leases:
    """How long locks last in each state."""

    queue_ms: int
    run_ms: int
    grace_ms: int
    retention_ms: int
    visibility_ms: int

    @classmethod
    def of(cls, settings: UniqueSettings, conf: Any) -> Leases:
        visibility_ms = _visibility_timeout_ms(conf)
        return cls(
            # A message that the broker may still redeliver must find its key held.
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

    @property
    def restore_ms(self) -> int:
        """How long the broker may redeliver a message after its acknowledgement was sent."""
        return min(self.queue_ms, self.visibility_ms + round(RESTORE_MARGIN_S * 1000))

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
    """Whether the broker redelivers after a time-out. RabbitMQ does so when the worker is gone."""
    if "visibility_timeout" in (conf.broker_transport_options or {}):
        return True
    return not str(conf.broker_write_url).startswith(AMQP)


def publish_retry_ms(policy: Mapping[str, Any] | None, conf: Any) -> int:
    """The longest that Celery retries to publish one message.

    A policy that retries for ever has no such bound: then it is an hour, and another caller may
    acquire the lock of a publisher that retries for longer.
    """
    policy = policy or {}
    retries = policy.get("max_retries", 3)
    if retries is None:
        return 3_600_000
    pauses: float = retries * float(policy.get("interval_max", 0.2) or 0)
    connecting = (retries + 1) * float(conf.broker_connection_timeout or 4)
    return int((pauses + connecting) * 1000)
