"""What a worker of the canvas tests imports."""

from __future__ import annotations

from tests.workers.canvas.app import app_of_environment
from tests.workers.canvas.dying import die_in_time

app = app_of_environment()
die_in_time()
