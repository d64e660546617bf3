"""What is wrong with a database URL can be told before anything connects.

Later it would look as if the database were away, or escape as an error of the driver's.
Values of a driver's options are not shown: one of them may be a password.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from celery_unique.exceptions import ConfigurationError
from celery_unique.messages import one_of, shown, suggestion

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

SETTING = "unique_store_url"

#: A place and its options, where a user and password should be.
_QUERY_IN_PASSWORD = re.compile(r"/[^?]*\?[^=]*=")

#: Drivers take these more than once: several hosts, and settings that are put together.
REPEATABLE = ("host", "options")


def wrong(reason: str) -> ConfigurationError:
    return ConfigurationError(f"{SETTING}: {reason}.", setting=SETTING)


def check_credentials(text: str, url: URL) -> None:
    """Refuse an ``@`` that is not percent-encoded in a password, or where one could be hidden.

    SQLAlchemy ends the password at the first one: the rest of it would be a host, and be shown.
    """
    if url.get_backend_name() == "sqlite":
        return  # a path may have one, and there is no password
    rest = text.partition("://")[2].replace("host=@", "host=")  # a socket of Linux's own kind
    before, at, after = rest.partition("@")
    has_user = url.username is not None or url.password is not None
    is_query = bool(_QUERY_IN_PASSWORD.search(before))
    if at and ("@" in after or not has_user or is_query):
        raise wrong(
            "it has an @ that does not part a user and password from the host. Write every @ in "
            "the user, the password and the options as %40"
        )


def check_place(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and (url.host or url.username or url.password):
        raise wrong(
            "what follows sqlite:// is a host, and SQLite has none. Write sqlite:///locks.db, or "
            "sqlite:////var/lib/shop/locks.db, with four slashes, for an absolute path"
        )
    if url.port is not None and not 0 < url.port < 65536:
        raise wrong("the port must be a number from 1 to 65535: write it as HOST:PORT/DATABASE")
    for host in _hosts(url):
        try:
            host.encode("idna")
        except UnicodeError:
            raise wrong(
                "the host is not a host name. Write it as HOST:PORT/DATABASE, with special "
                "characters in the user and password before it percent-encoded"
            ) from None


def _hosts(url: URL) -> Iterator[str]:
    """Those before the ``?`` and after it; a path is the directory of a socket."""
    given = url.query.get("host", ())
    for hosts in (url.host or "", *((given,) if isinstance(given, str) else given)):
        yield from (host for host in hosts.split(",") if not host.startswith(("/", "@")))


def check_names(url: URL, driver: str, allowed: Collection[str], own: Collection[str]) -> None:
    """Refuse options that neither the driver nor the store has, and those given twice."""
    database = "dbname" if "dbname" in allowed else "database"
    before = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    before[database] = url.database
    for name, value in url.query.items():
        if name not in allowed:
            raise _unknown(name, url, driver, own, allowed)
        if before.get(name):
            raise wrong(f"the option {name} says again what stands before the ?: write it once")
        if not isinstance(value, str) and name not in REPEATABLE:
            raise wrong(f"the option {name} is given more than once: write it once")


def _unknown(
    name: str, url: URL, driver: str, own: Collection[str], allowed: Collection[str]
) -> ConfigurationError:
    told = "" if _may_be_a_password(url) else f" {shown(name)}"
    near = suggestion(name, (*own, *allowed)) if told else ""
    others = f", and those of {driver} that a URL can say" if allowed else ""
    return wrong(
        f"the option{told} after the ? is unknown.{near} Use {one_of(own)}{others}. Special "
        "characters in the user or password before the host must be percent-encoded"
    )


def _may_be_a_password(url: URL) -> bool:
    """What follows a ``?`` in a password that is not encoded looks like options."""
    parts = (url.host or "", *url.query, *map(str, url.query.values()))
    return "password" in url.query or any("@" in part for part in parts)


def arguments_of(dialect: Dialect, url: URL) -> dict[str, Any]:
    """What the driver's ``connect`` will be given."""
    for name, value in url.query.items():  # one by one, to tell which it is
        if _arguments(dialect, url.set(query={name: value})) is None:
            raise wrong_value(name)
    arguments = _arguments(dialect, url)
    if arguments is None:
        raise wrong("its hosts and ports do not go together: write a port for each host, or none")
    return arguments


def _arguments(dialect: Dialect, url: URL) -> dict[str, Any] | None:
    from sqlalchemy.exc import ArgumentError

    try:
        return dict(dialect.create_connect_args(url)[1])
    except (ArgumentError, TypeError, ValueError):
        return None


def wrong_value(
    name: str, wanted: str = "a value that its driver understands"
) -> ConfigurationError:
    return wrong(f"the option {name} has a wrong value: write {wanted}")
