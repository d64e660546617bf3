"""The how-to for Django is a project that works: its files, as they stand on the page."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.docs.pages import DOCS, blocks
from tests.support.worker import REPOSITORY

PAGE = DOCS / "howto" / "use-django.md"

CALL = """
import django
import shop

django.setup()

from shop.admin import operations
from shop.tasks import rebuild_index

first, again = rebuild_index.delay(7), rebuild_index.delay(shop_id=7)
print(again.id == first.id, again.deduplicated, rebuild_index.delay_on_commit.__name__)
print([model.__name__ for model in operations._registry])
"""


def test_the_project_on_the_page_works(redis_url, tmp_path):
    for block in blocks(PAGE):
        if caption := block.options.get("caption"):
            path = tmp_path / caption
            path.parent.mkdir(exist_ok=True)
            server, _, _ = redis_url.rpartition("/")
            path.write_text(block.text.replace("redis://127.0.0.1:6379", server))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}",
        "DJANGO_SETTINGS_MODULE": "shop.settings",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "no issues" in run("-m", "django", "check", "--tag", "celery_unique")
    assert run("-c", CALL).splitlines() == ["True True delay_on_commit", "['Lock']"]
    assert "shop.tasks.rebuild_index" in run("-m", "django", "celery_unique", "list")
