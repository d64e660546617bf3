"""The code of the FastAPI page, with a real server, a real worker and a real Redis."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.support.process import LocalProcess
from tests.support.proxy import TcpProxy
from tests.support.redis import RedisServer
from tests.support.server import free_port
from tests.support.waiting import eventually

PAGE = DOCS / "howto" / "use-fastapi.md"

pytestmark = pytest.mark.slow

TEN = {"account": "a-1", "amount": 10}
Request = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def store(start_server, start_proxy) -> TcpProxy:
    return start_proxy(start_server(RedisServer).port)


@pytest.fixture
def shop(tmp_path: Path, store: TcpProxy) -> Path:
    """The page's code in ``shop.py``, without its test."""
    code = [block.text for block in blocks(PAGE) if block.language == "python"][:2]
    url = f"redis://127.0.0.1:{store.port}"
    text = "\n".join(code).replace("redis://localhost", url)
    assert text.count(url) == 2
    settings = "app.conf.update(unique_store_timeout=0.5)\n"
    settings += 'app.conf.broker_transport_options = {"socket_timeout": 2}\n'
    (tmp_path / "shop.py").write_text(text + settings)
    return tmp_path


@pytest.fixture
def request_(shop: Path) -> Iterator[Request]:
    """``request_("order-7", TEN)``: status and body; a GET where there is no payment."""
    port = free_port()
    server = LocalProcess(
        [sys.executable, "-m", "uvicorn", "shop:api", "--port", str(port)],
        log_path=shop / "uvicorn.log",
        cwd=shop,
        env={**os.environ, "PYTHONPATH": f"{shop}:{ROOT}"},
    )
    server.start()

    def request(key: str | None, payment: Any = None, customer: str = "ada"):
        path = "/payments" if payment else f"/payments/{key}"
        headers = {"X-Customer": customer, "Content-Type": "application/json"}
        if payment and key:
            headers["Idempotency-Key"] = key
        data = json.dumps(payment).encode() if payment else None
        url = f"http://127.0.0.1:{port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    try:
        server.wait_for_log("Application startup complete")
        eventually(lambda: request("nothing")[0] == 404, ignoring=(urllib.error.URLError,))
        yield request
    finally:
        server.stop()


def test_the_endpoints_serve_a_key_from_its_first_request_to_its_result(
    request_, shop, start_worker
):
    created, first = request_("order-7", TEN)
    repeated, again = request_("order-7", TEN)

    assert (created, repeated) == (202, 200)
    assert again == first
    assert request_("order-7") == (200, {**first, "state": "available"})
    assert request_("order-7", {**TEN, "amount": 99})[0] == 422
    assert request_(None, TEN)[0] == 400
    assert request_("k" * 256, TEN)[0] == 400
    other, theirs = request_("order-7", TEN, customer="grace")
    assert (other, theirs["task"] != first["task"]) == (202, True)

    start_worker("shop", pool="solo", python_path=[shop])
    eventually(lambda: request_("order-7")[1]["state"] == "completed")
    assert request_("order-7", TEN) == (200, first)


def test_an_outage_of_the_store_is_an_answer_and_keeps_no_other_request_waiting(request_, store):
    assert request_("order-1", TEN)[0] == 202
    store.stall()

    assert request_("order-2", TEN)[0] == 503
    assert request_("order-1")[0] == 503

    store.restore()
    eventually(lambda: request_("order-2", TEN)[0] in (200, 202))
