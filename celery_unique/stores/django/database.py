"""``django-db://ALIAS``: the SQL store on one of Django's databases.

It has connections of its own. On Django's, a lock taken in a transaction would be seen
by nobody else before the commit, and would be gone after a rollback.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_unique.exceptions import ConfigurationError
from celery_unique.stores.base import LockStore

from .aliases import SETTING, alias_of, check_alias, missing_package, refused, settings_missing

if TYPE_CHECKING:
    from sqlalchemy import URL

SCHEME = "django-db"

#: OPTIONS that Django itself reads, or that belong to its own connections and cursors.
_DJANGOS = frozenset(
    {
        *("isolation_level", "server_side_binding", "pool", "cursor_factory", "assume_role"),
        *("context", "row_factory", "prepare_threshold", "autocommit", "client_encoding"),
    }
)


class DjangoDatabaseStore:
    """Makes a :class:`~celery_unique.stores.sql.SqlStore` from a database's settings."""

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "", timeout_s: float = 2.0) -> LockStore:
        """The store behind the URL. Connects to nothing yet.

        What stands in the URL's query are the SQL store's options.
        """
        from celery_unique.stores.sql import SqlStore

        alias, options = alias_of(url)
        try:
            where = _url_of(alias).render_as_string(hide_password=False)
        except ImportError as error:
            raise missing_package(f"{SCHEME}://{alias}", error, "sql") or error from error
        try:
            return SqlStore.from_url(where, namespace=namespace, timeout_s=timeout_s, **options)
        except ConfigurationError as error:
            if error.setting != SETTING:
                raise
            missing = missing_package(f"{SCHEME}://{alias}", error, "sql")
            raise missing or ConfigurationError(
                f"{error} What stands before the ? of {SCHEME}://{alias} is made from "
                f"DATABASES[{alias!r}], and so are options of the driver.",
                setting=SETTING,
            ) from None


def _url_of(alias: str) -> URL:
    connection = _connection(alias)
    settings, what = connection.settings_dict, f"{SCHEME}://{alias}"
    if connection.vendor == "postgresql":
        return _postgresql_url(settings, what)
    if connection.vendor == "sqlite":
        return _sqlite_url(settings, what)
    if connection.vendor == "mysql":
        raise refused(
            what,
            "Django's settings of MySQL and MariaDB are those of another driver than the lock "
            "store's. Give it a URL of its own: mysql+pymysql://USER:PASSWORD@HOST/NAME",
        )
    raise refused(
        what,
        f"there is no lock store on {connection.display_name}. Use a PostgreSQL or SQLite "
        "database, or a redis:// URL",
    )


def _connection(alias: str) -> Any:
    """Django's wrapper, which knows its vendor without being connected."""
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured
    from django.db import connections

    try:
        _ = settings.DATABASES
    except ImproperlyConfigured:
        raise settings_missing(SCHEME) from None
    try:
        check_alias(SCHEME, alias, "DATABASES", list(connections))
        return connections[alias]
    except (ImproperlyConfigured, ImportError) as error:
        what = f"{SCHEME}://{alias}"
        missing = missing_package(what, error, "sql")
        raise missing or refused(what, _cannot_open(alias, error)) from error


def _cannot_open(alias: str, error: Exception) -> str:
    return f"Django cannot open it: {error}. Give DATABASES[{alias!r}] an ENGINE that is installed"


def _port(value: Any, what: str) -> int | None:
    try:
        return int(value) if value else None
    except ValueError:
        raise refused(what, "its PORT is not a number: write one from 1 to 65535") from None


def _postgresql_url(settings: Any, what: str) -> URL:
    from sqlalchemy import URL

    given = settings.get("OPTIONS") or {}
    query = {name: str(value) for name, value in given.items() if name not in _DJANGOS}
    if role := given.get("assume_role"):
        # In the schema's eyes the role is the user: the table must be that role's.
        escaped = str(role).replace("\\", "\\\\").replace(" ", "\\ ")
        query["options"] = f"{query.get('options', '')} -c role={escaped}".strip()
    host = settings.get("HOST") or None
    if host and host.startswith("/"):  # the directory of a socket is no host of a URL
        query["host"], host = host, None
    return URL.create(
        "postgresql+psycopg",
        username=settings.get("USER") or None,
        password=settings.get("PASSWORD") or None,
        host=host,
        port=_port(settings.get("PORT"), what),
        database=settings.get("NAME") or None,
        query=query,
    )


def _sqlite_url(settings: Any, what: str) -> URL:
    """A file of its own beside the database's.

    SQLite has one writer for each file: a task that is called in an open transaction would
    wait for that very transaction to end.
    """
    from sqlalchemy import URL

    name = str(settings["NAME"])
    if name in ("", ":memory:") or name.startswith("file:") or "mode=memory" in name:
        raise refused(
            what,
            "it is in memory, as Django's tests have it. Use memory:// in tests that stay in one "
            "process, or give the database a file (TEST: NAME)",
        )
    path = Path(name)
    beside = path.with_name(f"{path.stem}.celery_unique{path.suffix or '.sqlite3'}")
    return URL.create("sqlite", database=str(beside))
