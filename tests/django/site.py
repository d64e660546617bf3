"""The project's site as a browser sees it."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Mapping
from typing import ClassVar

from tests.support import Server
from tests.support.server import HOST
from tests.support.worker import REPOSITORY


class DjangoSite(Server):
    """``manage.py runserver``, which also serves the admin's style sheets."""

    start_timeout_s: ClassVar[float] = 60.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._given = dict(environment)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tests.django.shop.manage", "runserver"),
            *("--noreload", "--insecure", "--skip-checks", f"{HOST}:{self.port}"),
        ]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._given, "PYTHONPATH": str(REPOSITORY)}

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/admin/login/", timeout=5) as answer:
            return b"csrfmiddlewaretoken" in answer.read()
