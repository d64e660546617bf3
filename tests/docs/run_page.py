"""Run the Python blocks of one page, as one script: ``python run_page.py PAGE``.

Where a page names a server, its place is taken by what is in memory: the page shows what a user
would write, and the test needs no server. SQLite is real; its file is in the current directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.docs.pages import python_script

SERVERS = ("redis://", "rediss://", "amqp://", "postgresql")


def in_memory(url: Any, instead: str) -> Any:
    return instead if isinstance(url, str) and url.startswith(SERVERS) else url


def here(url: str) -> str:
    return url.replace("sqlite:////var/lib/shop/", f"sqlite:///{Path.cwd()}/")


def replace_servers() -> None:
    import celery

    from celery_unique import stores as runtime

    original_init, open_store = celery.Celery.__init__, runtime.open_store

    def init(self: Any, *args: Any, **options: Any) -> None:
        options["broker"] = in_memory(options.get("broker"), "memory://")
        options["backend"] = in_memory(options.get("backend"), "cache+memory://")
        original_init(self, *args, **options)

    def open_in_memory(url: str, **options: Any) -> Any:
        return open_store(here(in_memory(url, "memory://")), **options)

    celery.Celery.__init__ = init
    runtime.open_store = open_in_memory


def main() -> None:
    page = Path(sys.argv[1])
    replace_servers()
    script = compile(python_script(page), str(page), "exec", dont_inherit=True)
    exec(script, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
