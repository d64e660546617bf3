"""Lock and message in one act, where the lock store is the broker's own Redis database.

kombu builds a message and pushes it in ``Channel._put``. There the message is handed to the store
instead: one act admits the call and pushes its message, or does neither. Celery does not notice:
``_put`` returns, and the store's reply is read when Celery has returned from its publish, too. An
exception would make kombu replace its connection to the broker.

The header of the message says that it is such a call, and gets its values in ``_put``: a variable
of the thread would have to be reset after the call, and a signal could arrive before that.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import cache, wraps
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from celery import signals
from kombu.utils import json

from celery_unique.config.settings import UniqueSettings
from celery_unique.header import HEADER
from celery_unique.stores.base import LONGEST_TEXT, Acquired, Claim, LockStore, Push

from . import conflicts
from .store_client import AcquireFailed, CallerStoreClient, Wait

if TYPE_CHECKING:
    from .request import PublishRequest

logger = logging.getLogger("celery_unique")

#: In place of the two values of a header that the store adds. Not to be found in any message: the
#: text of a user may contain anything that is known in advance.
_CREATED_AT = f"at-{secrets.token_hex(12)}"
_OUTCOME = f"outcome-{secrets.token_hex(12)}"

_dumps: Callable[[object], str] = json.dumps


def why_two_steps(app: Any, settings: UniqueSettings, store: LockStore) -> str:
    """Why no call of this app is published in one act; empty where calls are."""
    if not settings.atomic_publish:
        return "unique_atomic_publish is False"
    if getattr(store, "address", None) is None:
        return "the lock store is not a single Redis server"
    connection = app.connection_for_write()
    if not _is_redis(connection):
        return "the broker is not Redis with kombu's own transport"
    if not _is_at(connection, store):
        return "the lock store is not the broker's server, database and user"
    if app.conf.task_send_sent_event:
        return "task_send_sent_event is on"
    return ""


def _is_redis(connection: Any) -> bool:
    """Whether a connection of kombu uses its own transport for one Redis server."""
    from kombu.transport.redis import Transport  # imports redis

    return connection.get_transport_cls() is Transport


def _is_at(connection: Any, store: LockStore) -> bool:
    """Whether a connection of kombu leads to the server and database of the store, as its user."""
    if getattr(connection, "credential_provider", None):
        return False
    host, port, path = connection.hostname or "localhost", connection.port or 6379, ""
    database, username = connection.virtual_host, connection.userid or ""
    if "://" in host:
        parts = urlsplit(host)
        query = dict(parse_qsl(parts.query))
        host, port, path = "", 0, parts.path
        database, username = query.get("virtual_host", ""), unquote(parts.username or "")
    number = str(database or "").lstrip("/") or "0"
    place = (host, int(port), int(number) if number.isdecimal() else -1, username, path)
    return place == store.address  # type: ignore[attr-defined,no-any-return]


def leads_to(channel: Any, store: LockStore) -> bool:
    """Whether a channel of kombu leads to the store: it may be that of a broker that kombu failed
    over to."""
    connection = channel.connection.client
    return _is_redis(connection) and _is_at(connection, store)


def has_receivers() -> bool:
    """Whether signals report each publish: they would report calls that are not published."""
    return bool(
        signals.before_task_publish.receivers
        or signals.after_task_publish.receivers
        or signals.task_sent.receivers
    )


class AtomicPublisher:
    """Publishes the calls of one app in one act each."""

    why_passed_by = "its message did not pass kombu's Redis channel"

    def __init__(self, client: CallerStoreClient) -> None:
        self.client = client
        _wrap_put()

    @classmethod
    def of(
        cls, app: Any, settings: UniqueSettings, client: CallerStoreClient
    ) -> AtomicPublisher | None:
        """None where no call of this app is published in one act."""
        why = why_two_steps(app, settings, client.store)
        if why:
            logger.debug("publishing in two steps, acquire and publish: %s", why)
            return None
        logger.debug("publishing in one act: the lock store is the broker")
        return cls(client)

    def publishes(self, request: PublishRequest) -> bool:
        """Whether this call is published in one act."""
        policy = request.policy
        # The ETA of these depends on what they replace, and is part of the message. (A merged call
        # postpones a message that is pushed already.)
        if policy.on_conflict == "replace_except_schedule" or (
            policy.max_wait is not None and policy.on_conflict != "merge"
        ):
            return False
        if request.run is not None or has_receivers():
            return False
        return request.connection is None or _is_redis(request.connection)

    def publish(self, request: PublishRequest) -> tuple[Acquired | None, Any]:
        """The store's reply, and Celery's result of a call that is published.

        No reply: the message has not passed kombu's channel. Raises AcquireFailed.
        """
        is_taken = self.client.taken_until.get(request.key, 0.0) > monotonic()
        # A probe is no repeated attempt: it would merge the same values once more.
        if is_taken and not request.may_be_merged:
            conflict = self.client.probe(request, request.claim())
            if conflict is not None:
                return conflict, None
        header = AtomicHeader(self.client, request)
        try:
            result = request.send(request.identify(), header, None, in_trail=False)
            if header.failed is not None:
                raise header.failed
            if header.wait is not None:
                header.acquired = self.client.receive_published(request, header.wait)
        except AcquireFailed:
            raise
        except BaseException:
            header.withdraw()
            raise
        acquired = header.acquired
        if acquired is not None and acquired.outcome == "created":
            if header.push is None:
                self.client.confirm(request, request.task_id)  # kombu has pushed it
            if request.parent is not None:
                add_to_trail(request, result)
        return acquired, result


def add_to_trail(request: PublishRequest, result: Any) -> None:
    """Celery does so before it is known whether the call is published."""
    if request.options.get("add_to_parent", True):
        request.app_state.app.current_worker_task.add_trail(result)


class AtomicHeader(dict[str, Any]):
    """The header of a message that the store pushes if it admits the call: empty until then.

    ``collect``: only note what is to be pushed, for a batch, or that the call takes two steps.
    """

    def __init__(
        self, client: CallerStoreClient, request: PublishRequest, *, collect: bool = False
    ) -> None:
        super().__init__()
        self._client = client
        self._request = request
        self._collect = collect
        self.claim: Claim | None = None
        #: What the store is handed; None: kombu pushes the message, if the call is admitted.
        self.push: Push | None = None
        self.takes_two_steps = False
        self.wait: Wait | None = None
        self.failed: AcquireFailed | None = None
        self.acquired: Acquired | None = None

    @property
    def is_admitted(self) -> bool:
        return self.acquired is not None and self.acquired.outcome == "created"

    def put(self, channel: Any, queue: str, message: dict[str, Any], options: Any) -> bool:
        """Hand the message to the store. True: kombu is to push it.

        Called once for each queue that the message is routed to, and again where kombu retries.
        """
        if self.push is None and self.failed is None and self.acquired is None:
            try:
                self.push = self._push(channel, queue, message, options)
                self.takes_two_steps = self.push is None
                if self._collect:
                    return False
                if self.push is None:
                    self.acquired = self._acquire()
                else:
                    assert self.claim is not None
                    self.wait = self._client.begin_publish(self._request, self.claim, self.push)
            except AcquireFailed as failed:
                self.failed = failed
        return self.push is None and self.is_admitted

    def _push(self, channel: Any, queue: str, message: dict[str, Any], options: Any) -> Push | None:
        """None: acquire and publish are two steps. Decided before anything is sent."""
        properties, request = message["properties"], self._request
        if properties["delivery_info"]["exchange"] or options.get("_publish_batch") is not None:
            return None  # perhaps to several queues, or together with other messages
        expires = getattr(channel, "_expires", None)  # since kombu 5.7
        if (expires and queue in expires) or not self._is_at_the_store(channel):
            return None
        message = _without_copy(message)
        self.claim = request.claim()
        self.update(request.header(request.task_id, 1, _OUTCOME).as_message(), at=_CREATED_AT)
        head, _, rest = _dumps(message).partition(f'"{_CREATED_AT}"')
        middle, _, tail = rest.partition(_OUTCOME)
        if not tail or len(head) + len(tail) > LONGEST_TEXT or _CREATED_AT in tail:
            return None
        priority = channel._get_message_priority(message, reverse=False)
        return Push(
            queue=channel.global_keyprefix + channel._q_for_pri(queue, priority),
            lease_ms=request.lease_ms,
            attempt=properties["delivery_tag"],
            head=head,
            middle=middle,
            tail=tail,
        )

    def _is_at_the_store(self, channel: Any) -> bool:
        checked: tuple[LockStore, bool] | None = channel.__dict__.get(HEADER)
        store = self._client.store
        if checked is None or checked[0] is not store:
            checked = channel.__dict__[HEADER] = (store, leads_to(channel, store))
        return checked[1]

    def _acquire(self) -> Acquired:
        """The first of two steps: the message is complete, and kombu pushes it if it may."""
        request, acquired = self._request, self._client.acquire(self._request)
        outcome = conflicts.admitted(request, acquired).outcome
        self.clear()
        self.update(request.header(request.task_id, acquired.now, outcome).as_message())
        return acquired

    def withdraw(self) -> None:
        """The call is not made after all."""
        if self.wait is not None:
            self._client.withdraw_later(self._request)
        elif self.is_admitted:
            self._client.withdraw(self._request)

    # Celery and tracing libraries copy the headers of a call.

    def __copy__(self) -> AtomicHeader:
        return self

    def __deepcopy__(self, _: Any) -> AtomicHeader:
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _without_copy(message: dict[str, Any]) -> dict[str, Any]:
    """The message, of which one header alone gets the values of the store.

    Tracing libraries repeat all headers in one that is named ``headers``. A worker does not read
    that copy of ours, and neither does a retry.
    """
    headers = message["headers"]
    copies = headers.get("headers")
    if not isinstance(copies, dict) or HEADER not in copies:
        return message
    copies = {name: value for name, value in copies.items() if name != HEADER}
    return {**message, "headers": {**headers, "headers": copies}}


@cache
def _wrap_put() -> None:
    """Make kombu hand over the messages whose header says so. Once in a process: kombu makes new
    channels, and revives old ones, at any time."""
    from kombu.transport.redis import Channel

    put: Any = Channel._put

    @wraps(put)
    def _put(channel: Any, queue: str, message: dict[str, Any], **options: Any) -> Any:
        header = message.get("headers", {}).get(HEADER)
        if isinstance(header, AtomicHeader) and not header.put(channel, queue, message, options):
            return None
        return put(channel, queue, message, **options)

    Channel._put = _put
