"""Where the server is: a URL and options become the arguments of redis-py's connections."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import redis
from redis.connection import AbstractConnection, UnixDomainSocketConnection, parse_url

from celery_unique.exceptions import ConfigurationError, conceal_passwords

from .url_options import LEFT_OUT, check_values, read_query, wrong_url

#: In the options of a broker there are also those that are for sentinels alone.
NOT_OURS = LEFT_OUT | {
    *("master_name", "sentinel_kwargs", "min_other_sentinels"),
    # What a pool of redis-py's gives its connections: they would report to that pool, and refuse
    # the parser that there is without hiredis.
    *("maint_notifications_pool_handler", "maint_notifications_config", "himport_registry"),
    *("oss_cluster_maint_notifications_handler", "event_dispatcher"),
    *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
}

#: One of redis-py's connections: their methods are not typed.
Connection = Any


@dataclass(frozen=True)
class Address:
    """How to make a connection. Nothing is connected before ``connection().connect()``."""

    label: str  # for messages: host, port and database, never a credential
    connection_class: type[AbstractConnection]
    options: dict[str, Any] = field(repr=False)

    def connection(self) -> Connection:
        return self.connection_class(**self.options)

    def at(self, host: str, port: int) -> Address:
        """Another server, reached in the same way."""
        options = {**self.options, "host": host, "port": port}
        return Address(_label(options), self.connection_class, options)

    def conceal(self, text: str) -> str:
        """The text without the password, should a server or a driver ever repeat it."""
        password = self.options.get("password")
        return conceal_passwords(text.replace(password, "***") if password else text)


def address_of(url: str, *, ssl: Mapping[str, Any] | bool | None, **options: Any) -> Address:
    """Read the URL; what stands in it wins over the options, as in redis-py."""
    given = {**options, **_from_url(url), **_ssl_options(ssl)}
    connection_class = given.get("connection_class", redis.Connection)
    if ssl and connection_class is redis.Connection:
        connection_class = redis.SSLConnection  # as kombu: redis:// with broker_use_ssl
    return address_with(connection_class, given)


def address_with(connection_class: type[AbstractConnection], given: Mapping[str, Any]) -> Address:
    """The address from arguments of a connection, as a pool of redis-py's has them."""
    given = {name: value for name, value in given.items() if name not in NOT_OURS}
    if "ssl_cert_reqs" in given:
        given["ssl_cert_reqs"] = _verify_mode(given["ssl_cert_reqs"])
    address = Address(_label(given), connection_class, {**_fixed(connection_class), **given})
    try:
        address.connection()
    except TypeError as error:
        unknown = re.search(r"keyword argument '(\w+)'", str(error))
        raise wrong_url(_unknown(unknown[1]) if unknown else str(error)) from None
    except (ValueError, redis.RedisError) as error:
        raise wrong_url(address.conceal(str(error))) from None
    return address


def _unknown(name: str) -> str:
    if name.startswith("ssl_"):
        return f"{name!r} is for TLS: write rediss:// for a connection with it"
    return f"unknown option {name!r}"


def _from_url(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition(":")
    if scheme == "redis+socket":  # Celery's spelling
        scheme, rest = "unix", rest.replace("virtual_host=", "db=")
    scheme, url = scheme.lower(), f"{scheme.lower()}:{rest}"
    if scheme not in ("redis", "rediss", "unix"):
        raise wrong_url(f"the scheme {scheme!r} is not one of redis, rediss, redis+socket")
    try:
        parts = urlsplit(url)
        _check(scheme, parts)
        flags = read_query(parts)
        options: dict[str, Any] = {**parse_url(url), **flags}
        check_values(options)
        return options
    except ConfigurationError:
        raise
    except ValueError as error:
        # Other words of Python's can repeat a part of the URL, and so of a password.
        told = str(error) if str(error).startswith("Invalid value for") else "it cannot be read"
        raise wrong_url(told.rstrip(".")) from None


def _check(scheme: str, parts: SplitResult) -> None:
    # What follows a special character in a password is not part of the credentials for urlsplit,
    # but would be taken for a port, a path or an option, and shown as such.
    name = parts.query.partition("=")[0]
    outside = "@" in name or ("@" in parts.path and "@" not in parts.netloc and parts.netloc)
    if parts.fragment or outside:
        raise wrong_url("special characters in the user or password must be percent-encoded")
    database = unquote(parts.path).strip("/")
    # redis-py would take database 0 for a word. It is not shown: after an unquoted "/" in the
    # password it is the rest of that.
    if scheme != "unix" and database and not database.isdecimal():
        raise wrong_url("what follows the host is not the number of a database")
    try:
        _ = parts.port
    except ValueError:
        raise wrong_url("the port is not a number from 0 to 65535") from None
    try:
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        raise wrong_url("the host is not a host name") from None


def _ssl_options(ssl: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    """``broker_use_ssl``: its names come with and without ``ssl_``."""
    if ssl is None or isinstance(ssl, bool):
        return {}
    return {name if name.startswith("ssl_") else f"ssl_{name}": ssl[name] for name in ssl}


def _verify_mode(value: Any) -> Any:
    """Celery writes ``CERT_REQUIRED`` where redis-py wants ``required``."""
    return value.removeprefix("CERT_").lower() if isinstance(value, str) else value


def _fixed(connection_class: type[AbstractConnection]) -> dict[str, Any]:
    # RESP2, no CLIENT SETINFO: the fewer round trips to connect, the sooner it is done.
    options: dict[str, Any] = {"protocol": 2}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
        options["driver_info"] = None
    else:  # redis-py before 7.2
        options |= {"lib_name": None, "lib_version": None}
    if not issubclass(connection_class, UnixDomainSocketConnection):
        # A peer that went away without a word is noticed while the connection is idle.
        names = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
        options["socket_keepalive"] = True
        options["socket_keepalive_options"] = {
            getattr(socket, name): value for name, value in names.items() if hasattr(socket, name)
        }
    return options


def _label(options: Mapping[str, Any]) -> str:
    database = options.get("db") or 0
    if "path" in options:
        return f"{options['path']}/{database}"
    host = str(options.get("host") or "localhost").lower()
    return f"{host}:{options.get('port') or 6379}/{database}"
