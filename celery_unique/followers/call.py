"""The call of a follower, as it is stored with the lock of its holder.

It is kept as text, so that any worker can publish it under its own id (its holder has died), or
complete it without ever running it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery.app.task import Context
from celery.utils.functional import maybe_list
from kombu import serialization

from celery_unique.config.leases import Leases, delay_ms, expires_ms
from celery_unique.exceptions import ConfigurationError
from celery_unique.header import HEADER, LockHeader

from .continuations import IN_BODY

VERSION = 1

#: Stands before a message that was encoded by the user's codec.
ENCODED = "encoded:"

_kombu: Any = serialization  # typed in part only

#: Options that mean something in the calling process only.
_OF_THE_CALLER = (
    "producer",
    "publisher",
    "connection",
    "router",
    "result_cls",
    "task_type",
    "add_to_parent",
    "countdown",
)


@dataclass(frozen=True, slots=True)
class FollowerCall:
    """A call as any process can publish it, with the header of its lock."""

    name: str
    args: Any
    kwargs: Any
    options: Mapping[str, Any]
    header: LockHeader
    grace_ms: int = 0
    lease_ms: int = 0
    #: How the arguments travel, as in the message: a worker reads no other format.
    serializer: str = field(default="json", compare=False)

    @classmethod
    def of(
        cls,
        app: Any,
        name: str,
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        header: LockHeader,
        *,
        grace_ms: int,
        lease_ms: int,
    ) -> FollowerCall:
        return cls(
            name,
            list(args or ()),
            dict(kwargs or {}),
            _portable(app, header.task_id, options),
            header,
            grace_ms,
            lease_ms,
            options.get("serializer") or app.conf.task_serializer,
        )

    @classmethod
    def of_request(cls, app: Any, request: Any, header: LockHeader, leases: Leases) -> FollowerCall:
        """The call of a message that a worker holds, as Celery would send it again."""
        args, kwargs, _ = request._payload
        context = request._context
        options = context.as_execution_options()
        if "ignore_result" in context.__dict__:
            options["ignore_result"] = context.ignore_result
        options["serializer"] = _kombu.registry.type_to_name.get(request.content_type)
        info = request.delivery_info
        options["priority"] = info.get("priority")
        if info.get("exchange"):
            options.update(exchange=info["exchange"], routing_key=info.get("routing_key"))
        else:
            options["queue"] = info.get("routing_key")
        header, grace_ms, lease_ms = header.as_published(), leases.grace_ms, leases.queue_ms
        return cls.of(
            app, request.name, args, kwargs, options, header, grace_ms=grace_ms, lease_ms=lease_ms
        )

    def dumps(self, codec: Any = None) -> str:
        """As text for the lock store; encoded, where there is a ``unique_follower_codec``."""
        payload = [self.args, self.kwargs, dict(self.options)]
        content_type, encoding, body = _kombu.dumps(payload, serializer=self.serializer)
        binary = isinstance(body, bytes)
        document = {
            "v": VERSION,
            "task": self.name,
            "type": content_type,
            "encoding": encoding,
            "body": base64.b64encode(body).decode() if binary else body,
            "binary": binary,
            "lock": self.header.as_message(),
            "grace": self.grace_ms,
            "lease": self.lease_ms,
        }
        text = json.dumps(document, separators=(",", ":"))
        return text if codec is None else encoded(codec, text)

    @classmethod
    def loads(cls, app: Any, text: str, codec: Any = None) -> FollowerCall:
        document = json.loads(decoded(codec, text))
        body = document["body"]
        args, kwargs, options = _kombu.loads(
            base64.b64decode(body) if document["binary"] else body,
            document["type"],
            document["encoding"],
            accept=_kombu.prepare_accept_content(app.conf.accept_content),
        )
        header = LockHeader.from_message(document["lock"])
        assert header is not None
        times = document["grace"], document["lease"]
        return cls(document["task"], args, kwargs, options, header, *times)

    @classmethod
    def unreadable(cls, task_id: str, key: str, text: str) -> FollowerCall:
        """In place of a call that cannot be read: its id, and its name where that is readable."""
        name = ""
        with suppress(Exception):
            name = str(json.loads(text)["task"])
        return cls(name, [], {}, {"task_id": task_id}, LockHeader(task_id, key))

    @property
    def task_id(self) -> str:
        return self.header.task_id

    def has_expired(self, app: Any) -> bool:
        left_ms = expires_ms(app, self.options)  # at least 1
        return left_ms is not None and left_ms <= 1

    # -- what is made of it ------------------------------------------------------

    def request(self, **facts: Any) -> Context:
        """As in the worker, had it been published and run."""
        options = self.options
        stamped = options.get("stamped_headers")
        request = Context(
            {
                **(options.get("headers") or {}),
                "id": self.task_id,
                "task": self.name,
                "args": self.args,
                "kwargs": self.kwargs,
                "callbacks": options.get("link"),
                "errbacks": options.get("link_error"),
                "chain": options.get("chain"),
                "chord": options.get("chord"),
                "group": options.get("group_id"),
                "group_index": options.get("group_index"),
                "root_id": options.get("root_id"),
                "parent_id": options.get("parent_id"),
                "reply_to": options.get("reply_to"),
                "correlation_id": self.task_id,
                "retries": options.get("retries") or 0,
                "shadow": options.get("shadow"),
                "stamped_headers": stamped,
                "stamps": {name: options[name] for name in stamped or () if name in options},
                "replaced_task_nesting": options.get("replaced_task_nesting") or 0,
                "delivery_info": {
                    "routing_key": options.get("routing_key") or options.get("queue"),
                    "priority": options.get("priority"),
                },
                "called_directly": False,
                **facts,
            }
        )
        if "ignore_result" in options:  # else the task decides
            request.ignore_result = options["ignore_result"]
        # What is published in its name continues a task that has ended.
        request.__dict__[IN_BODY] = False
        return request

    def publish(self, app: Any) -> None:
        """Publish it under its own id, for a lock that is already its own."""
        task = app._tasks.get(self.name)
        options = dict(self.options)
        options["headers"] = {**(options.get("headers") or {}), HEADER: self.header.as_message()}
        if task is not None:
            options["task_type"] = task
        app.send_task(self.name, self.args, self.kwargs, add_to_parent=False, **options)


def encoded(codec: Any, text: str) -> str:
    """As the ``unique_follower_codec`` encodes what the store keeps of a call."""
    try:
        encoded = codec.encode(text.encode())
    except Exception as error:
        raise ConfigurationError(
            f"unique_follower_codec: encode failed ({error!r}): nothing was published",
            setting="unique_follower_codec",
        ) from error
    if not isinstance(encoded, bytes):
        raise ConfigurationError(
            f"unique_follower_codec: encode returned {type(encoded).__name__}: it must be bytes",
            setting="unique_follower_codec",
        )
    return ENCODED + base64.b64encode(encoded).decode()


def decoded(codec: Any, text: str) -> str:
    """What was stored before the codec was set is read as it is."""
    if not text.startswith(ENCODED):
        return text
    if codec is None:
        raise ConfigurationError(
            "A follower's message, or a merged value, in the lock store is encoded, and this "
            "process has no unique_follower_codec: set the one that the callers have.",
            setting="unique_follower_codec",
        )
    return bytes(codec.decode(base64.b64decode(text.removeprefix(ENCODED)))).decode()


def _portable(app: Any, task_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without what belongs to this process, and with what Celery would add here:
    absolute times, the task that calls, the queue for replies."""
    kept = {
        name: value
        for name, value in options.items()
        if value is not None and name not in _OF_THE_CALLER
    }
    delay = delay_ms(app, options)
    if delay:
        kept["eta"] = _in_ms(app, delay)
    else:
        kept.pop("eta", None)
    expires = expires_ms(app, options)
    if expires is not None:
        kept["expires"] = _in_ms(app, expires)
    for name in ("link", "link_error", "stamped_headers"):
        if name in kept:
            kept[name] = list(maybe_list(kept[name]))
    for name in ("queue", "exchange"):
        if name in kept:
            kept[name] = str(getattr(kept[name], "name", kept[name]))
    headers = {k: v for k, v in (kept.pop("headers", None) or {}).items() if k != HEADER}
    if headers:
        kept["headers"] = headers
    _add_family(app, task_id, kept)
    kept["task_id"] = task_id
    kept["reply_to"] = kept.get("reply_to") or app.thread_oid
    return kept


def _add_family(app: Any, task_id: str, options: dict[str, Any]) -> None:
    """Root, parent and priority, as ``send_task`` sets them from the task that calls."""
    parent = app.current_worker_task
    if parent is not None and not (options.get("root_id") and options.get("parent_id")):
        request = parent.request
        options["root_id"] = options.get("root_id") or request.root_id or request.id
        options["parent_id"] = options.get("parent_id") or request.id
        if app.conf.task_inherit_parent_priority:
            priority = (request.delivery_info or {}).get("priority")
            if priority is not None:
                options.setdefault("priority", priority)
    options["root_id"] = options.get("root_id") or task_id


def _in_ms(app: Any, milliseconds: int) -> str:
    moment = app.now() + timedelta(milliseconds=milliseconds)
    return str(moment.isoformat())
