"""Amazon SQS, as moto's server imitates it."""

from __future__ import annotations

import sys
import urllib.request
import uuid

from kombu.utils.url import safequote

from tests.support.server import HOST, Server


class SqsServer(Server):
    @property
    def url(self) -> str:
        return f"sqs://{safequote('key')}:{safequote('secret')}@{HOST}:{self.port}//"

    def options(self, visibility_timeout_s: float) -> dict[str, object]:
        """The ``broker_transport_options`` of an app, whose queues nobody else has."""
        return {
            "region": "eu-west-1",
            "is_secure": False,
            "visibility_timeout": visibility_timeout_s,
            "wait_time_seconds": 1,
            "polling_interval": 0.1,
            "queue_name_prefix": f"{uuid.uuid4().hex[:8]}-",
        }

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]

    def _answers(self) -> bool:
        address = f"http://{HOST}:{self.port}/moto-api/data.json"
        with urllib.request.urlopen(address, timeout=5) as reply:
            return bool(reply.status == 200)
