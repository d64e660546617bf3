"""Check-ins and spans of the real SDK, as they arrive at a server."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support import eventually
from tests.workers.apps.reported import reported_app
from tests.workers.test_beats import KINDS, Beats

pytestmark = pytest.mark.slow


class Sentry:
    """A server that keeps what is reported to it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        items = self.items

        class Receive(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                items.extend(_items(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.dsn = f"http://key@127.0.0.1:{self._server.server_port}/1"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def check_ins(self) -> dict[str, list[str]]:
        """The statuses of each, in order."""
        found: dict[str, list[str]] = {}
        for item in list(self.items):
            if "check_in_id" in item:
                assert item["monitor_slug"] == "nightly"
                found.setdefault(item["check_in_id"], []).append(item["status"])
        return found

    def spans_of(self, transaction: str) -> list[dict[str, Any]]:
        return [
            span
            for item in list(self.items)
            if item.get("transaction") == transaction
            for span in item.get("spans", ())
        ]


def _items(body: bytes) -> Iterator[dict[str, Any]]:
    lines = body.splitlines()[1:]  # the first one is the envelope's
    for header, item in zip(lines[::2], lines[1::2], strict=False):
        if json.loads(header)["type"] in ("check_in", "transaction"):
            yield json.loads(item)


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    server = Sentry()
    yield server
    server.stop()


def test_ticks_that_are_duplicates_are_closed_and_lock_operations_are_spans(
    sentry, redis_url, start_worker, tmp_path
):
    start_worker(
        "tests.workers.apps.reported",
        concurrency=3,
        env={"REPORTED_REDIS": redis_url, "REPORTED_TOOL": sentry.dsn},
        args=["--beat", "--schedule", str(tmp_path / "schedule")],
    )
    app = reported_app(redis_url)
    props = app.props
    eventually(lambda: props.runs("beat") == 1, timeout=60, message="no tick ran")

    def closed() -> list[str]:
        return [i for i, statuses in sentry.check_ins().items() if "ok" in statuses]

    eventually(lambda: len(closed()) >= 2, timeout=60, message="no check-in was closed")
    first, *others = sentry.check_ins().items()
    assert first[1] == ["in_progress"], "its task runs"
    assert [statuses for _, statuses in others[:2]] == [["in_progress", "ok"]] * 2
    assert props.runs("beat") == 1

    props.let_go("beat")
    eventually(
        lambda: sentry.check_ins()[first[0]] == ["in_progress", "ok"],
        timeout=60,
        message="the run did not close its own check-in",
    )

    # A body that calls a unique task.
    assert app.tasks["shop.call"].delay("spans").get(timeout=60) == "created"
    props.let_go("spans")

    def operations(transaction: str) -> set[str]:
        spans = sentry.spans_of(transaction)
        return {span["description"] for span in spans if span["op"] == "db.lock"}

    eventually(lambda: "celery_unique acquire" in operations("shop.call"), timeout=60)
    eventually(lambda: "celery_unique finish" in operations("shop.rebuild"), timeout=60)
    [acquire] = [
        span
        for span in sentry.spans_of("shop.call")
        if span["description"] == "celery_unique acquire"
    ]
    began, ended = (
        datetime.fromisoformat(acquire[name]) for name in ("start_timestamp", "timestamp")
    )
    assert timedelta() < ended - began < timedelta(seconds=5)
    props.let_go("beat", 2)
    app.close()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"celery"}))
def test_ticks_that_are_duplicates_are_closed_with_other_schedulers(
    kind, sentry, redis_url, tmp_path
):
    entries = {"nightly": "shop.rebuild"}  # which no worker runs
    beats = Beats(redis_url, tmp_path, kind, None, False, entries=entries, sentry=sentry.dsn)
    try:
        beats.start(0)
        eventually(
            lambda: sum("ok" in statuses for statuses in sentry.check_ins().values()) >= 2,
            timeout=120,
            message="no check-in was closed",
        )
    finally:
        beats.close()

    first, *others = sentry.check_ins().values()
    assert first == ["in_progress"], "its task waits"
    assert others[:2] == [["in_progress", "ok"]] * 2
    assert len(beats.messages("shop.rebuild")) == 1
