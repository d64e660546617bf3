"""When a message may run and until when it counts, as milliseconds from now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_make_aware

#: The last moment that every time zone can show: a lease may end after the year 9999.
LAST_MOMENT = datetime(9999, 12, 31, tzinfo=UTC)
_LAST_MS = int(LAST_MOMENT.timestamp() * 1000)


def moment_of(milliseconds: int) -> datetime:
    """A time of a store's clock, to be shown; what comes after the last moment is that."""
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
