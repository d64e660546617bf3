"""``make example`` as the first thing that is done with a clone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support import LocalProcess, eventually
from tests.support.environments import ROOT, clean_env, outer_python
from tests.support.server import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is under version control, or is about to be."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


@pytest.mark.server
@pytest.mark.timeout(300)
def test_the_example_runs_on_redis_in_a_clean_clone(clone, tmp_path, redis_server):
    port, flower = free_port(), free_port()
    options = f"--port {port} --flower-port {flower}"
    made = LocalProcess(
        ["make", "example", f"PYTHON={outer_python()}", f"ARGS={options}"],
        log_path=tmp_path / "make.log",
        cwd=clone,
        env={
            **clean_env(),
            "PYTHONUNBUFFERED": "1",
            "SHOP_DATA": str(tmp_path / "data"),
            "SHOP_REDIS_URL": redis_server.fresh_url(),
            "SHOP_WORK_S": "1",
        },
    )
    made.start()
    try:
        made.wait_for_log("Ctrl-C stops it", timeout=200)
        order = {"product": 1, "quantity": 1, "email": "ada@example.com"}
        headers = {"Content-Type": "application/json", "Idempotency-Key": '"8e03978e"'}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/orders/", json.dumps(order).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.status == 202
        mails = tmp_path / "data" / "mail"
        eventually(lambda: mails.exists() and any(mails.iterdir()), timeout=60)
    finally:
        if made.is_running():
            made.signal_group(signal.SIGINT)  # as Ctrl-C does
        made.stop(signal.SIGINT, timeout=60)
