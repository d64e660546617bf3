"""Optional: messages that Celery builds while the store acquires their locks.

For a store that can send and receive apart, where it is not the broker: with RabbitMQ and a Redis
store a new call takes about a tenth less. Celery builds a message and sends it in one function,
``send_task``, which calls ``app.amqp.create_task_message`` in between: there the store's reply is
awaited, which has mostly arrived by then. A call that is not admitted leaves by an exception, and
nothing of it is sent: until that moment Celery has not used the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER
from celery_unique.policy.fields import REPLACING
from celery_unique.stores.base import Acquired

from . import conflicts
from .request import PublishRequest
from .store_client import AcquireFailed, CallerStoreClient


class NotAdmitted(Exception):
    """The lock was not acquired: the message that was being built is not sent."""


class OverlappedPublisher:
    """Publishes the calls of one app, each acquired while its message is built."""

    why_passed_by = "its message is not Celery's own"

    def __init__(self, app: Any, client: CallerStoreClient) -> None:
        self._app = app
        self._client = client

    def publishes(self, request: PublishRequest) -> bool:
        # The message of a replacement depends on what it replaces, and Celery uses the broker
        # for messages that are to be delayed.
        if request.run or request.delay_ms or request.policy.on_conflict in REPLACING:
            return False
        if request.batch_options or request.app_state.sends_sent_events:
            return False
        if self._client.taken_until.get(request.key, 0.0) > monotonic():
            return False
        amqp = self._app.amqp
        return hasattr(amqp.create_task_message, "admits") or _patch_create_task_message(amqp)

    def publish(self, request: PublishRequest) -> tuple[Acquired | None, Any]:
        """The store's reply, and Celery's result of a call that is published.

        No reply: code of the user's own has built the message. Raises AcquireFailed.
        """
        request.identify()
        began = monotonic()
        header = PendingHeader(request, self._client, self._client.begin_acquire(request), began)
        try:
            result = request.send(request.task_id, header, None)
        except NotAdmitted:
            return header.receive(), None
        except AcquireFailed:
            raise
        except BaseException:
            self._withdraw(request, header)
            raise
        if not header.is_received:
            # Published without a header, so that nothing would release its lock.
            self._withdraw(request, header)
            return None, result
        acquired = header.receive()
        if acquired.outcome == "created":
            self._client.confirm(request, request.task_id)
        return acquired, result

    def _withdraw(self, request: PublishRequest, header: PendingHeader) -> None:
        """The call is not made after all: release what it may have acquired."""
        try:
            self._client.withdraw_acquired(request, header.receive())
        except (StoreUnavailable, AcquireFailed):
            self._client.withdraw_later(request)
        except BaseException:
            if header.acquired is not None:
                raise
            # It was interrupted, which is why we are here, and is already being withdrawn.


class PendingHeader(dict[str, Any]):
    """The header of a message whose lock is being acquired: empty until the call is admitted.

    It travels among the headers of the call. A variable of the thread would have to be reset
    after the call, and a signal could arrive before that.
    """

    def __init__(
        self,
        request: PublishRequest,
        client: CallerStoreClient,
        wait: Callable[[], Acquired],
        began: float,
    ) -> None:
        super().__init__()
        self._request = request
        self._client = client
        self._wait = wait
        self._began = began
        self._error: BaseException | None = None
        self.is_received = False
        self.acquired: Acquired | None = None

    def receive(self) -> Acquired:
        """The reply of the store. It is read once: the connection may be in use by another
        call afterwards."""
        if not self.is_received:
            self.is_received = True
            try:
                self.acquired = self._client.receive(self._request, self._wait)
            except BaseException as error:
                self._error = error
                raise
        if self.acquired is None:
            assert self._error is not None
            raise self._error
        return self.acquired

    def admit(self) -> dict[str, Any]:
        """The header as the message carries it. Raises NotAdmitted for a call that conflicts."""
        request, acquired = self._request, self.receive()
        if acquired.outcome != "created":
            raise NotAdmitted
        self._client.keep_grace(request, self._began)
        outcome = conflicts.admitted(request, acquired).outcome
        packed = request.header(request.task_id, acquired.now, outcome).as_message()
        self.update(packed)  # for a ``send_task`` that has copied its headers
        return packed

    def __copy__(self) -> PendingHeader:
        return self

    def __deepcopy__(self, _: Any) -> PendingHeader:
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _patch_create_task_message(amqp: Any) -> bool:
    """Make messages of this object wait for their locks. False: it does not allow that."""
    build = amqp.create_task_message

    def create_task_message(task_id: str, *args: Any, **options: Any) -> Any:
        message = build(task_id, *args, **options)
        headers: Any = options.get("headers")
        header = headers.get(HEADER) if headers else None
        if isinstance(header, PendingHeader):
            headers[HEADER] = message[0][HEADER] = header.admit()
        return message

    create_task_message.admits = True  # type: ignore[attr-defined]
    try:
        amqp.create_task_message = create_task_message
    except AttributeError:  # a class of the user that has no such attribute to set
        return False
    return True
