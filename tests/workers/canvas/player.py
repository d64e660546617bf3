"""Applies every shape in a process of its own, since result backends are set up for good."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support import LocalProcess, eventually
from tests.support.stage import Stage
from tests.support.worker import REPOSITORY


class Player:
    def __init__(self, stage: Stage, backend: str) -> None:
        self._told = stage.directory / "told.json"
        self._process = LocalProcess(
            [sys.executable, "-m", "tests.workers.canvas.play", str(self._told), backend],
            log_path=stage.directory / "player.log",
            cwd=REPOSITORY,
            env=stage.env,
        )
        self._process.start()

    def told(self) -> dict[str, Any]:
        """What the shapes came to, once all have ended."""
        process = self._process
        eventually(lambda: not process.is_running(), timeout=200, message="it still runs")
        assert process.exit_code == 0, process.log()[-4000:]
        told: dict[str, Any] = json.loads(self._told.read_text())
        return told

    def kill(self) -> None:
        self._process.kill()
