"""What a URL and its options ask for, checked before anything connects."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError
from celery_unique.messages import install_command, one_of, shown, suggestion

from .url_check import SETTING, check_credentials, check_names, check_place, wrong

if TYPE_CHECKING:
    from sqlalchemy import URL

INSTALL = install_command("sql")

#: What a scheme is opened with. Only these drivers can be told a deadline for every wait.
DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+pymysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
}

PORTS = {"postgresql": 5432, "mysql": 3306}
DATABASES = {"postgresql": "PostgreSQL", "mysql": "MariaDB or MySQL", "sqlite": "SQLite"}

#: Options of one database alone.
ONLY_FOR = {"synchronous": "sqlite", "through_pooler": "postgresql"}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}(\.[A-Za-z_][A-Za-z0-9_]{0,49})?")


@dataclass(frozen=True, slots=True)
class Options:
    """Where the table is and how to get at it."""

    url: URL
    namespace: str
    timeout_s: float
    table: str = "celery_unique_lock"
    create_table: bool = True
    pool_size: int = 10
    synchronous: str = "normal"
    through_pooler: bool = False

    @property
    def shown_url(self) -> str:
        plain = self.url.set(drivername=self.url.get_backend_name(), query={})
        return plain.render_as_string(hide_password=True)

    def fingerprint(self) -> str:
        """The same for everyone who uses this table and namespace, and no secret in it."""
        url = self.url
        if url.get_backend_name() == "sqlite":
            place = os.path.realpath(url.database or "")
        else:
            port = url.port or PORTS[url.get_backend_name()]
            place = f"{(url.host or '').lower()}:{port}/{url.database or ''}"
        text = "\n".join((url.get_backend_name(), place, self.table, self.namespace))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_options(url: str, namespace: str, timeout_s: float, given: dict[str, Any]) -> Options:
    """Options stand in the URL's query or are given beside it; what is given wins."""
    parsed = _parsed(url)
    check_place(parsed)
    in_query = {name: parsed.query[name] for name in _READERS if name in parsed.query}
    parsed = parsed.difference_update_query(in_query)
    unknown = next((name for name in given if name not in _READERS), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store has no option {shown(unknown)}."
            f"{suggestion(unknown, _READERS)} Use {one_of(_READERS)}.",
            setting=SETTING,
        )
    if len(namespace) > 100:
        raise ConfigurationError(
            "unique_namespace is longer than 100 characters.", setting="unique_namespace"
        )
    if parsed.get_backend_name() == "mysql" and namespace != namespace.rstrip(" "):
        raise ConfigurationError(
            "unique_namespace ends with a space, which MariaDB and MySQL do not tell from none.",
            setting="unique_namespace",
        )
    chosen: dict[str, Any] = {
        name: _READERS[name](name, value) for name, value in {**in_query, **given}.items()
    }
    _check_database(parsed.get_backend_name(), chosen)
    options = Options(_resolved(parsed), namespace, timeout_s, **chosen)
    if options.url.get_backend_name() == "sqlite":  # the other drivers have options of their own
        check_names(options.url, "SQLite", (), own_options("sqlite"))
    return options


def own_options(backend: str) -> list[str]:
    return [name for name in _READERS if ONLY_FOR.get(name, backend) == backend]


def _check_database(backend: str, chosen: dict[str, Any]) -> None:
    for name, database in ONLY_FOR.items():
        if name in chosen and backend != database:
            raise ConfigurationError(
                f"{SETTING}: {name} is for {DATABASES[database]}, and this is "
                f"{DATABASES[backend]}: leave it out.",
                setting=SETTING,
            )


def _parsed(url: str) -> URL:
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs SQLAlchemy: {INSTALL}", setting=SETTING
        ) from error
    try:
        parsed = make_url(url)
        check_credentials(url, parsed)
        _check_blank(url)
        if "\0" in unquote(url):  # which libpq and SQLite take for its end
            raise ValueError
    except (ArgumentError, ValueError):
        # Neither its text nor the cause: a URL that was not understood may show its password.
        raise ConfigurationError(
            "unique_store_url is not a database URL: write sqlite:///locks.db, "
            "postgresql+psycopg://host:5432/database or mysql+pymysql://host:3306/database. "
            "Special characters in the user or password before the host must be percent-encoded.",
            setting=SETTING,
        ) from None
    driver = DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store cannot use {shown(parsed.drivername)}: write "
            "postgresql+psycopg://, mysql+pymysql:// or sqlite:///.",
            setting=SETTING,
        )
    return parsed.set(drivername=driver)


def _check_blank(url: str) -> None:
    """SQLAlchemy leaves out options without a value."""
    _, _, query = url.rpartition("?")
    if "?" not in url or "@" in query:  # then it is the rest of a password
        return
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            # After another "?", or an "&", it may be the rest of a password.
            hidden = url.count("?") > 1 or "password" in query
            told = "an option after the ?" if hidden else f"the option {shown(name)}"
            raise wrong(f"{told} has no value: write one, or leave it out")


def _resolved(url: URL) -> URL:
    """An absolute path: the file must not change when the process changes its directory."""
    if url.get_backend_name() != "sqlite":
        return url
    path = url.database or ""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs a file, as in sqlite:///locks.db: a database in "
            "memory is another one for every connection. Use memory:// for locks within one "
            "process.",
            setting=SETTING,
        )
    return url.set(database=str(Path(path).absolute()))


def _table(name: str, value: Any) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise _wrong(name, value, "a table name of letters, digits and _, or schema.table")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise _wrong(name, value, "true or false")


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not isinstance(value, bool) and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise _wrong(name, value, "a whole number above 0")


def _synchronous(name: str, value: Any) -> str:
    if isinstance(value, str) and value.lower() in ("normal", "full"):
        return value.lower()
    raise _wrong(name, value, "normal or full")


def _wrong(name: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: the option {name}={shown(value)} is wrong: write {wanted}.",
        setting=SETTING,
    )


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "table": _table,
    "create_table": _flag,
    "pool_size": _count,
    "synchronous": _synchronous,
    "through_pooler": _flag,
}
