"""No password, nor a part of one, in an error, a log line or a command's output.

Passwords are often pasted into URLs as they are. A special character that is not percent-encoded
then ends the password early for whoever reads the URL, and the rest is a host, a path, an option.
"""

from __future__ import annotations

import logging
import re
import traceback
from contextlib import suppress

import pytest

import celery_unique
from celery_unique.cli import main
from celery_unique.config.app_state import state_of
from tests.support.app import plain_app

#: "7731" may be taken for a port, and is no line number of a traceback.
PASSWORDS = [f"{head}{special}tail9x" for head in ("h3ad", "7731") for special in "@/?#:;%[&"]
PASSWORDS += ["@tail9x", "h3ad@mid@tail9x", "7731:@tail9x", "h3ad tail9x", "h3ad&tail9x=1@x"]

URLS = [
    "redis://:{}@127.0.0.1:1/0",
    "redis://user:{}@127.0.0.1:1/0",
    "rediss://:{}@127.0.0.1:1/0",
    "redis+socket://:{}@/nowhere/redis.sock",
    "redis://127.0.0.1:1/0?password={}",
    "sentinel://:{}@127.0.0.1:1/0",
    "redis+cluster://:{}@127.0.0.1:1/0",
    "postgresql+psycopg://user:{}@127.0.0.1:1/db",
    "postgresql://:{}@127.0.0.1:1/db",
    "postgresql://us/er:{}@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?password={}",
    "mysql+pymysql://user:{}@127.0.0.1:1/db",
    "mariadb://user:{}@127.0.0.1:1/db",
    "sqlite://user:{}@host/locks.db",
]

#: By ``doctor``, which waits for workers each time.
EXAMINED = (URLS[0], URLS[7], URLS[11])


@pytest.mark.slow
@pytest.mark.parametrize("url", URLS)
def test_no_part_of_a_password_is_ever_shown(url, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    shown = {}
    for password in PASSWORDS:
        caplog.clear()
        texts = []
        app = plain_app(unique_store_url=url.format(password), unique_store_timeout=0.1)

        @app.task(name="shop.rebuild", unique=True, shared=False)
        def rebuild(shop_id: int) -> None: ...

        try:
            celery_unique.install(app)
            rebuild.delay(7)
        except Exception as error:
            texts += [repr(error), *traceback.format_exception(error)]
        with suppress(Exception):
            texts.append(repr(state_of(app).store))
        examined = password == "h3ad@tail9x" and url in EXAMINED
        for command in ("list", "doctor") if examined else ("list",):
            with suppress(SystemExit):
                main(app, [command], "celery unique")
        texts += [caplog.text, *capsys.readouterr()]
        text = "\n".join(texts)
        if found := re.search(r"h3ad|tail9x|\bmid\b|(?<![\w.])7731(?!\w)", text):
            shown[password] = text[max(0, found.start() - 80) : found.end() + 20]

    assert shown == {}
