"""``django-db://ALIAS``: the SQL store on one of Django's databases.

It has connections of its own. On Django's, a lock that is acquired in a transaction would be
invisible to other processes before the commit, and would be gone after a rollback.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_unique.exceptions import ConfigurationError
from celery_unique.stores.base import LockStore

from .aliases import SETTING, alias_of, missing_package, opened, refused

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
        """The store at the URL. Does not connect yet. The query has the SQL store's options."""
        from celery_unique.stores.sql import SqlStore

        alias, options = alias_of(url)
        what = f"{SCHEME}://{alias}"
        try:
            from django.db import connections

            wrapper = opened(connections, what, "DATABASES", "ENGINE")
            where = _url_of(wrapper, what).render_as_string(hide_password=False)
        except ImportError as error:
            raise missing_package(what, error) or error from error
        try:
            return SqlStore.from_url(where, namespace=namespace, timeout_s=timeout_s, **options)
        except ConfigurationError as error:
            if error.setting != SETTING:
                raise
            raise missing_package(what, error) or ConfigurationError(
                f"{error} Host, user, database and the options of the driver come from "
                f"DATABASES[{alias!r}].",
                setting=SETTING,
            ) from None


def _url_of(connection: Any, what: str) -> URL:
    settings = connection.settings_dict
    if connection.vendor == "postgresql":
        return _postgresql_url(settings, what)
    if connection.vendor == "sqlite":
        return _sqlite_url(settings, what)
    if connection.vendor == "mysql":
        raise refused(
            what,
            "Django's settings of MySQL and MariaDB are for another driver than the lock store's. "
            "Give it a URL of its own: mysql+pymysql://USER:PASSWORD@HOST/NAME",
        )
    raise refused(
        what,
        f"there is no lock store on {connection.display_name}. Use a PostgreSQL or SQLite "
        "database, or a redis:// URL",
    )


def _postgresql_url(settings: Any, what: str) -> URL:
    from sqlalchemy import URL

    try:
        port = int(settings.get("PORT") or 0) or None
    except ValueError:
        raise refused(what, "its PORT is not a number: write one from 1 to 65535") from None
    given = settings.get("OPTIONS") or {}
    query = {name: str(value) for name, value in given.items() if name not in _DJANGOS}
    if role := given.get("assume_role"):
        # The role owns the schema: the tables must be created by it.
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
        port=port,
        database=settings.get("NAME") or None,
        query=query,
    )


def _sqlite_url(settings: Any, what: str) -> URL:
    """A file of its own beside that of the database.

    SQLite has one writer for each file: a call in an open transaction would wait for the end of
    that transaction.
    """
    from sqlalchemy import URL

    name = str(settings["NAME"])
    if name in ("", ":memory:") or name.startswith("file:") or "mode=memory" in name:
        raise refused(
            what,
            "it is in memory, as in Django's tests. Use memory:// in tests that stay in one "
            "process, or give the database a file (TEST: NAME)",
        )
    path = Path(name)
    beside = path.with_name(f"{path.stem}.celery_unique{path.suffix or '.sqlite3'}")
    return URL.create("sqlite", database=str(beside))
