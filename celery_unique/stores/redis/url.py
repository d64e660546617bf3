"""What may follow the ``?`` of a Redis URL, and whether it can be meant.

redis-py takes any word for true, and finds a wrong file or cipher only when it connects, where
it would look as if the server were away.
"""

from __future__ import annotations

import inspect
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.connection import AbstractConnection, UnixDomainSocketConnection, parse_url

from celery_unique.exceptions import (
    ConfigurationError,
    conceal_passwords,
    one_of,
    shown,
    suggestion,
)

#: Options that belong to a client or a pool, or that this store must decide itself for its
#: time-out to hold. A broker's URL may carry them for kombu, so they are left out in silence.
LEFT_OUT = frozenset(
    {
        *("socket_timeout", "socket_connect_timeout", "timeout", "max_connections"),
        *("retry", "retry_on_timeout", "retry_on_error", "health_check_interval"),
        *("encoding", "encoding_errors", "decode_responses", "protocol", "legacy_responses"),
        *("connection_class", "driver_info", "lib_name", "lib_version"),
    }
)

#: redis-py's connections have more, whose values a URL cannot say.
IN_A_URL = (
    *("db", "username", "password", "client_name", "socket_keepalive", "socket_read_size"),
    *("ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile"),
    *("ssl_keyfile", "ssl_password", "ssl_check_hostname", "ssl_min_version", "ssl_ciphers"),
    *("ssl_include_verify_flags", "ssl_exclude_verify_flags"),
    *("ssl_validate_ocsp", "ssl_validate_ocsp_stapled"),
)
FLAGS = ("socket_keepalive", "ssl_check_hostname", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled")
FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

_WORDS = {
    **dict.fromkeys(("1", "t", "true", "y", "yes", "on"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no", "off"), False),
}


def read_query(parts: SplitResult) -> dict[str, bool]:
    """The flags in it. Refuses what is unknown, and what says again what stands before it."""
    given = parse_qs(parts.query, keep_blank_values=True)
    before = {
        "db": parts.path.strip("/") if parts.scheme != "unix" else "",
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    for name, values in given.items():
        if name not in IN_A_URL and name not in LEFT_OUT:
            raise unknown_option(name, parts.query)
        if before.get(name) and values != [before[name]]:
            raise wrong_url(f"{name!r} is given before the ? and again after it: leave one out")
    return {name: flag(name, given[name][0]) for name in FLAGS if name in given}


def unknown_option(name: str, query: str, more: tuple[str, ...] = ()) -> ConfigurationError:
    if "@" in query or "password" in query:  # it may be the rest of one, after a "?" or "&"
        return wrong_url("there is an unknown option after the ?")
    known = (*more, *IN_A_URL)
    return wrong_url(
        f"unknown option {name!r}.{suggestion(name, known)} After the ? may stand {one_of(known)}"
    )


def flag(name: str, value: str) -> bool:
    """To redis-py any word but a few is true."""
    if value.lower() not in _WORDS:
        raise wrong_url(f"{name!r} must be true or false")
    return _WORDS[value.lower()]


def check_values(given: Mapping[str, Any]) -> None:
    if given.get("db", 0) < 0:
        raise wrong_url("'db' must be 0 or more")
    for name in FILES:
        if name in given and not Path(given[name]).exists():
            raise wrong_url(f"{name}: there is no file {shown(given[name])} on this machine")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise wrong_url("ssl_keyfile is of no use without ssl_certfile: give both")
    _check_tls(given)


def _check_tls(given: Mapping[str, Any]) -> None:
    if not given.keys() & {"ssl_ciphers", "ssl_min_version"}:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if "ssl_ciphers" in given:
            context.set_ciphers(given["ssl_ciphers"])
    except ssl.SSLError:
        raise wrong_url("ssl_ciphers has no cipher that OpenSSL knows") from None
    try:
        if "ssl_min_version" in given:
            context.minimum_version = ssl.TLSVersion(given["ssl_min_version"])
    except ValueError:
        raise wrong_url("'ssl_min_version' is no version of TLS: 771 is 1.2, 772 is 1.3") from None


def wrong_url(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"unique_store_url is not the URL of a Redis server: {reason}. Write it as "
        "redis://HOST:6379/0, with USER:PASSWORD@ before the host where they are needed and "
        "special characters in them %-encoded",
        setting="unique_store_url",
    )


SENTINEL_PORT = 26379

#: What may follow the ``?`` of a sentinel URL beside the options of the primary's connections.
SENTINELS_OWN = (
    *("sentinel_master", "master_name", "min_other_sentinels", "ssl"),
    *("sentinel_username", "sentinel_password"),
)


@dataclass(frozen=True)
class Cluster:
    """Nodes to ask first; they know the others."""

    seeds: tuple[Address, ...]

    @property
    def label(self) -> str:
        return ",".join(sorted(_place(seed) for seed in self.seeds))


@dataclass(frozen=True)
class Sentinels:
    """Who knows where the primary is, and how to talk to it once it is known."""

    master_name: str
    sentinels: tuple[Address, ...]
    primary: Address  # its host and port stand for any
    min_other_sentinels: int = 0

    @property
    def label(self) -> str:
        database = self.primary.options.get("db") or 0
        sentinels = ",".join(sorted(_place(sentinel) for sentinel in self.sentinels))
        return f"{self.master_name}/{database} of {sentinels}"


@dataclass(frozen=True)
class _Parts:
    """A URL with several hosts, taken apart. The user is still %-encoded."""

    user: str  # with its "@", or empty
    hosts: tuple[str, ...]
    path: str
    query: Mapping[str, str]


def cluster_of(url: str, *, ssl: Mapping[str, Any] | bool | None, **options: Any) -> Cluster:
    """``redis+cluster://USER:PASSWORD@HOST:6379,HOST:6379``; ``rediss+cluster://`` with TLS."""
    scheme = url.partition("+")[0].lower()
    parts = _parts(url)
    if parts.path.strip("/") not in ("", "0") or parts.query.get("db", "0") != "0":
        raise _wrong("a cluster has only database 0: leave 'db' out", _CLUSTER)
    query = f"?{urlencode(parts.query)}" if parts.query else ""
    seeds = tuple(
        address_of(f"{scheme}://{parts.user}{host}{query}", ssl=ssl, **options)
        for host in parts.hosts
    )
    return Cluster(seeds)


def sentinels_of(
    url: str,
    *,
    ssl: Mapping[str, Any] | bool | None,
    master_name: str | None = None,
    sentinel_kwargs: Mapping[str, Any] | None = None,
    min_other_sentinels: int = 0,
    **options: Any,
) -> Sentinels:
    """``sentinel://USER:PASSWORD@HOST:26379;HOST:26379/0?sentinel_master=NAME``.

    As kombu writes it, each host may have ``sentinel://`` of its own, and the name of the
    primary stands in the transport options. User and password are the primary's.
    """
    parts = _parts(url)
    query = dict(parts.query)
    for option in query.keys() - {*SENTINELS_OWN, *IN_A_URL, *LEFT_OUT}:
        raise unknown_option(option, "&".join((*query, *query.values())), SENTINELS_OWN)
    names = [query.pop(option, "") for option in ("sentinel_master", "master_name")]
    if all(names):
        raise _wrong("sentinel_master and master_name are one option: leave one out", _SENTINEL)
    name = names[0] or names[1] or master_name
    if not name:
        raise _wrong(
            "it does not say which primary is meant. Add ?sentinel_master=NAME, or set "
            "master_name in the transport options of the broker",
            _SENTINEL,
        )
    asking: dict[str, Any] = dict(sentinel_kwargs or {})
    for option in ("username", "password"):
        if (given := query.pop(f"sentinel_{option}", None)) is not None:
            asking[option] = given
    fewest = query.pop("min_other_sentinels", None) or min_other_sentinels
    in_query = flag("ssl", query.pop("ssl")) if "ssl" in query else False
    encrypted = in_query or any(each.startswith("ssl_") for each in query)
    scheme = "rediss" if encrypted else "redis"
    rest = f"?{urlencode(query)}" if query else ""
    primary = address_of(f"{scheme}://{parts.user}primary{parts.path}{rest}", ssl=ssl, **options)
    sentinels = tuple(_sentinel(host, asking) for host in parts.hosts)
    return Sentinels(name, sentinels, primary, _count("min_other_sentinels", fewest))


def _sentinel(host: str, options: dict[str, Any]) -> Address:
    options = dict(options)
    scheme = "rediss" if options.pop("ssl", False) else "redis"
    address = address_of(f"{scheme}://{host}", ssl=None, **options)
    return address if "port" in address.options else address.at(_host(address), SENTINEL_PORT)


def _parts(url: str) -> _Parts:
    """Everything but the hosts may stand at any of them, as it does in a broker's URL."""
    user, path, query, hosts = "", "", "", []
    for part in url.partition("://")[2].split(";"):
        part = part.partition("://")[2] or part
        part, _, its_query = part.partition("?")
        authority, slash, its_path = part.partition("/")
        its_user, at, its_hosts = authority.rpartition("@")
        no_host = its_hosts.startswith(":") and ";" in url
        if no_host or "#" in part or "@" in its_query.partition("=")[0]:
            # Part of a password, that would be taken for a port or an option, and shown.
            raise wrong_url("special characters in the user or password must be percent-encoded")
        hosts += [host for host in its_hosts.split(",") if host]
        user = user or its_user + at
        path = path or slash + its_path
        query = query or its_query
    return _Parts(user, tuple(hosts) or ("localhost",), path, dict(parse_qsl(query)))


def _place(address: Address) -> str:
    return address.label.rpartition("/")[0]


def _host(address: Address) -> str:
    return str(address.options.get("host") or "localhost")


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit()):
        raise _wrong(f"{name} must be a whole number", _SENTINEL)
    return int(text)


_CLUSTER = "redis+cluster://HOST:6379,HOST:6379"
_SENTINEL = "sentinel://HOST:26379;HOST:26379/0?sentinel_master=NAME"


def _wrong(reason: str, form: str) -> ConfigurationError:
    return ConfigurationError(
        f"unique_store_url cannot be used: {reason}. Write it as {form}", setting="unique_store_url"
    )


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
