"""The example shop, run as a user would run it."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import LocalProcess
from tests.support.server import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "example_project"


@dataclass
class Answer:
    status: int
    headers: Any
    body: Any


class Shop:
    """``run.py`` in a process of its own, on a free port and in a directory of its own."""

    def __init__(self, directory: Path, redis_url: str = "", *options: str) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.data = directory / "data"
        command = [sys.executable, str(EXAMPLE / "run.py"), "--port", str(self.port), *options]
        self.process = LocalProcess(
            command,
            log_path=directory / "run.log",
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "SHOP_DATA": str(self.data),
                "SHOP_REDIS_URL": redis_url,
                "SHOP_WORK_S": "2",
                "SHOP_REPORT_EVERY_S": "5",
            },
        )

    def start(self) -> Shop:
        self.process.start()
        self.process.wait_for_log("Ctrl-C stops it", timeout=90)
        return self

    def stop(self) -> int:
        return self.process.stop(signal.SIGINT, timeout=60)

    def mails(self) -> int:
        folder = self.data / "mail"
        return len(list(folder.iterdir())) if folder.exists() else 0

    def order(self, key: str | None, **changes: Any) -> Answer:
        order = {"product": 1, "quantity": 1, "email": "ada@example.com", **changes}
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.ask("orders/", json.dumps(order).encode(), headers)

    def ask(
        self, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return Answer(response.status, response.headers, json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, json.load(error))

    def events(self, kind: str, task: str) -> list[dict[str, Any]]:
        return [
            event
            for event in self.ask("activity/").body["events"]
            if event["kind"] == kind and event["task"] == f"shop.tasks.{task}"
        ]


@pytest.fixture(scope="module")
def open_shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def start(redis_url: str = "", *options: str) -> Shop:
        shop = Shop(tmp_path_factory.mktemp("shop"), redis_url, *options)
        shops.append(shop)
        return shop.start()

    yield start
    for shop in shops:  # all at once: each takes its time
        if shop.process.is_running():
            shop.process.send_signal(signal.SIGINT)
    for shop in shops:
        shop.process.stop(signal.SIGINT, timeout=60)
