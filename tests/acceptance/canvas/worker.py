"""What a worker of the canvas tests imports."""

from __future__ import annotations

from tests.acceptance.canvas.app import app_of_environment

app = app_of_environment()
