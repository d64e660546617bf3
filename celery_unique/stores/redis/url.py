"""Store URLs of Redis: read and checked before anything connects.

redis-py takes any word for true, and finds a wrong file or cipher only when it connects, where it
would look like an unavailable server.
"""

from __future__ import annotations

import inspect
import re
import socket
import ssl as tls
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlencode, urlsplit

import redis
from kombu.utils.imports import symbol_by_name
from redis.connection import AbstractConnection, UnixDomainSocketConnection, parse_url
from redis.credentials import CredentialProvider

from celery_unique.exceptions import (
    ConfigurationError,
    conceal_passwords,
    one_of,
    shown,
    suggestion,
)

#: One of redis-py's connections: their methods are not typed.
Connection = Any
#: As ``broker_use_ssl``.
TlsOptions = Mapping[str, Any] | bool | None

#: Options that belong to a client or a pool, or that this store must decide itself for its
#: time-out to hold. A broker's URL may have them for kombu, so they are ignored.
IGNORED = frozenset(
    {
        *("socket_timeout", "socket_connect_timeout", "timeout", "max_connections"),
        *("retry", "retry_on_timeout", "retry_on_error", "health_check_interval"),
        *("encoding", "encoding_errors", "decode_responses", "protocol", "legacy_responses"),
        *("connection_class", "driver_info", "lib_name", "lib_version"),
    }
)
#: Besides those, options of sentinels, and what a pool of redis-py passes to its connections: they
#: would report to that pool, and refuse the parser that there is without hiredis.
NOT_OF_A_CONNECTION = IGNORED | {
    *("master_name", "sentinel_kwargs", "min_other_sentinels"),
    *("maint_notifications_pool_handler", "maint_notifications_config", "himport_registry"),
    *("oss_cluster_maint_notifications_handler", "event_dispatcher"),
    *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
}

#: redis-py's connections have more, whose values cannot be written in a URL.
IN_A_URL = (
    *("db", "username", "password", "credential_provider"),
    *("client_name", "socket_keepalive", "socket_read_size"),
    *("ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile"),
    *("ssl_keyfile", "ssl_password", "ssl_check_hostname", "ssl_min_version", "ssl_ciphers"),
    *("ssl_include_verify_flags", "ssl_exclude_verify_flags"),
    *("ssl_validate_ocsp", "ssl_validate_ocsp_stapled"),
)
FLAGS = ("socket_keepalive", "ssl_check_hostname", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled")
FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
#: Options of a sentinel URL, besides those of the primary's connections.
OF_SENTINELS = (
    *("sentinel_master", "master_name", "min_other_sentinels", "ssl"),
    *("sentinel_username", "sentinel_password"),
)
SENTINEL_PORT = 26379

_WORDS = {
    **dict.fromkeys(("1", "t", "true", "y", "yes", "on"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no", "off"), False),
}

_SERVER = (
    "redis://HOST:6379/0, with USER:PASSWORD@ before the host where they are needed and special "
    "characters in them %-encoded"
)
_CLUSTER = "redis+cluster://HOST:6379,HOST:6379"
_SENTINEL = "sentinel://HOST:26379;HOST:26379/0?sentinel_master=NAME"


def wrong_url(reason: str, form: str = _SERVER) -> ConfigurationError:
    return ConfigurationError(
        f"unique_store_url cannot be used for Redis: {reason}. Write it as {form}",
        setting="unique_store_url",
    )


# -- one server ------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """How to create a connection. Nothing connects before ``connection().connect()``."""

    label: str  # for messages: host, port and database, never a credential
    connection_class: type[AbstractConnection]
    options: dict[str, Any] = field(repr=False)

    @property
    def place(self) -> str:
        """Host and port, or the path of a socket."""
        return self.label.rpartition("/")[0]

    def connection(self) -> Connection:
        return self.connection_class(**self.options)

    def at(self, host: str, port: int) -> Address:
        """Another server, reached in the same way."""
        options = {**self.options, "host": host, "port": port}
        return Address(_label(options), self.connection_class, options)

    def conceal(self, text: str) -> str:
        """The text without the password, in case a server or a driver repeats it."""
        password = self.options.get("password")
        return conceal_passwords(text.replace(password, "***") if password else text)


def address_of(url: str, *, ssl: TlsOptions, **options: Any) -> Address:
    """Read the URL; its options override the others, as in redis-py."""
    given = _with_provider({**options, **_from_url(url)})
    if isinstance(ssl, Mapping):  # its names come with and without ssl_
        given |= {name if name.startswith("ssl_") else f"ssl_{name}": ssl[name] for name in ssl}
    connection_class = given.get("connection_class", redis.Connection)
    if ssl and connection_class is redis.Connection:
        connection_class = redis.SSLConnection  # as kombu: redis:// with broker_use_ssl
    return address_with(connection_class, given)


def _with_provider(given: dict[str, Any]) -> dict[str, Any]:
    """As kombu and Celery: the name of a class becomes an object, which replaces user and
    password. redis-py calls it for each connection, so that it may return new ones."""
    provider = given.get("credential_provider")
    if not provider:
        return given
    if isinstance(provider, str):
        try:
            provider = symbol_by_name(provider)()
        except Exception as error:
            raise wrong_url(f"credential_provider {provider!r} cannot be made: {error}") from error
    if not isinstance(provider, CredentialProvider):
        raise wrong_url("credential_provider is not a redis.CredentialProvider")
    rest = {name: given[name] for name in given if name not in ("username", "password")}
    return {**rest, "credential_provider": _Credentials(provider)}


class _Credentials(CredentialProvider):
    """Those of the user's provider, whose errors mean that the store is unavailable."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            name = type(self._provider).__name__
            raise redis.AuthenticationError(f"{name} returned no credentials: {error}") from error


def address_with(connection_class: type[AbstractConnection], given: Mapping[str, Any]) -> Address:
    """The address from the arguments of a connection, as a pool of redis-py has them."""
    given = {name: value for name, value in given.items() if name not in NOT_OF_A_CONNECTION}
    verify = given.get("ssl_cert_reqs")
    if isinstance(verify, str):  # Celery writes CERT_REQUIRED for redis-py's "required"
        given["ssl_cert_reqs"] = verify.removeprefix("CERT_").lower()
    address = Address(_label(given), connection_class, {**_defaults(connection_class), **given})
    try:
        address.connection()
    except TypeError as error:
        found = re.search(r"keyword argument '(\w+)'", str(error))
        if found is None:
            raise wrong_url(str(error)) from None
        if found[1].startswith("ssl_"):
            raise wrong_url(f"{found[1]!r} is for TLS: write rediss:// for it") from None
        raise wrong_url(f"unknown option {found[1]!r}") from None
    except (ValueError, redis.RedisError) as error:
        raise wrong_url(address.conceal(str(error))) from None
    return address


def _defaults(connection_class: type[AbstractConnection]) -> dict[str, Any]:
    # RESP2 and no CLIENT SETINFO: fewer round trips to connect.
    options: dict[str, Any] = {"protocol": 2}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
        options["driver_info"] = None
    else:  # redis-py before 7.2
        options |= {"lib_name": None, "lib_version": None}
    if not issubclass(connection_class, UnixDomainSocketConnection):
        # Detects a peer that disappeared while the connection was idle.
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


# -- checks ------------------------------------------------------------------------


def _from_url(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition(":")
    if scheme == "redis+socket":  # Celery's spelling
        scheme, rest = "unix", rest.replace("virtual_host=", "db=")
    scheme = scheme.lower().replace("valkey", "redis")
    url = f"{scheme}:{rest}"
    if scheme not in ("redis", "rediss", "unix"):
        raise wrong_url(f"the scheme {scheme!r} is not one of redis, rediss, redis+socket")
    try:
        parts = urlsplit(url)
        _check_parts(parts)
        flags = _read_query(parts)
        options: dict[str, Any] = {**parse_url(url), **flags}
    except ConfigurationError:
        raise
    except ValueError as error:
        # Other texts of Python can repeat a part of the URL, and so of a password.
        text = str(error) if str(error).startswith("Invalid value for") else "it cannot be read"
        raise wrong_url(text.rstrip(".")) from None
    _check_values(options)
    return options


def _check_parts(parts: SplitResult) -> None:
    # Behind a special character, urlsplit takes the rest of a password for a port, a path or an
    # option, and an error would show it.
    name = parts.query.partition("=")[0]
    outside = "@" in name or ("@" in parts.path and "@" not in parts.netloc and parts.netloc)
    if parts.fragment or outside:
        raise _unquoted()
    database = unquote(parts.path).strip("/")
    # redis-py would take a word for database 0. Not shown: it may be a part of a password.
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise wrong_url("what follows the host is not the number of a database")
    try:
        _ = parts.port
    except ValueError:
        raise wrong_url("the port is not a number from 0 to 65535") from None
    try:
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        raise wrong_url("the host is not a host name") from None


def _read_query(parts: SplitResult) -> dict[str, bool]:
    """The flags in it. Refuses unknown options, and those that contradict the rest of the URL."""
    given = parse_qs(parts.query, keep_blank_values=True)
    before = {
        "db": parts.path.strip("/") if parts.scheme != "unix" else "",
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    for name, values in given.items():
        if name not in IN_A_URL and name not in IGNORED:
            raise _unknown_option(name, parts.query)
        if before.get(name) and values != [before[name]]:
            raise wrong_url(f"{name!r} is given before the ? and again after it: leave one out")
    return {name: _flag(name, given[name][0]) for name in FLAGS if name in given}


def _check_values(given: Mapping[str, Any]) -> None:
    if given.get("db", 0) < 0:
        raise wrong_url("'db' must be 0 or more")
    for name in FILES:
        if name in given and not Path(given[name]).exists():
            raise wrong_url(f"{name}: there is no file {shown(given[name])} on this machine")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise wrong_url("ssl_keyfile is of no use without ssl_certfile: give both")
    context = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT)
    try:
        if "ssl_ciphers" in given:
            context.set_ciphers(given["ssl_ciphers"])
        if "ssl_min_version" in given:
            context.minimum_version = tls.TLSVersion(given["ssl_min_version"])
    except tls.SSLError:
        raise wrong_url("ssl_ciphers has no cipher that OpenSSL knows") from None
    except ValueError:
        raise wrong_url("'ssl_min_version' is no version of TLS: 771 is 1.2, 772 is 1.3") from None


def _flag(name: str, value: str) -> bool:
    if value.lower() not in _WORDS:
        raise wrong_url(f"{name!r} must be true or false")
    return _WORDS[value.lower()]


def _unknown_option(name: str, query: str, more: tuple[str, ...] = ()) -> ConfigurationError:
    if "@" in query or "password" in query:  # it may be the rest of one, after a "?" or "&"
        return wrong_url("there is an unknown option after the ?")
    known = (*more, *IN_A_URL)
    return wrong_url(
        f"unknown option {name!r}.{suggestion(name, known)} The options are {one_of(known)}"
    )


def _unquoted() -> ConfigurationError:
    return wrong_url("special characters in the user or password must be percent-encoded")


# -- several servers ---------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """The nodes to query first; they know the others."""

    seeds: tuple[Address, ...]

    @property
    def label(self) -> str:
        return ",".join(sorted(seed.place for seed in self.seeds))


@dataclass(frozen=True)
class Sentinels:
    """The sentinels that know the primary's address, and how to connect to it."""

    master_name: str
    sentinels: tuple[Address, ...]
    primary: Address  # with any host and port
    min_other_sentinels: int = 0

    @property
    def label(self) -> str:
        database = self.primary.options.get("db") or 0
        sentinels = ",".join(sorted(sentinel.place for sentinel in self.sentinels))
        return f"{self.master_name}/{database} of {sentinels}"


def cluster_of(url: str, *, ssl: TlsOptions, **options: Any) -> Cluster:
    """``redis+cluster://USER:PASSWORD@HOST:6379,HOST:6379``; ``rediss+cluster://`` with TLS."""
    scheme = url.partition("+")[0].lower()
    user, hosts, path, query = _split(url)
    if path.strip("/") not in ("", "0") or query.get("db", "0") != "0":
        raise wrong_url("a cluster has only database 0: leave 'db' out", _CLUSTER)
    rest = f"?{urlencode(query)}" if query else ""
    urls = [f"{scheme}://{user}{host}{rest}" for host in hosts]
    return Cluster(tuple(address_of(each, ssl=ssl, **options) for each in urls))


def sentinels_of(
    url: str,
    *,
    ssl: TlsOptions,
    master_name: str | None = None,
    sentinel_kwargs: Mapping[str, Any] | None = None,
    min_other_sentinels: int = 0,
    **options: Any,
) -> Sentinels:
    """``sentinel://USER:PASSWORD@HOST:26379;HOST:26379/0?sentinel_master=NAME``.

    As in kombu, each host may have its own ``sentinel://``, and the name of the primary may be in
    the transport options. User and password are the primary's.
    """
    user, hosts, path, query = _split(url)
    for option in query.keys() - {*OF_SENTINELS, *IN_A_URL, *IGNORED}:
        raise _unknown_option(option, "&".join((*query, *query.values())), OF_SENTINELS)
    names = [query.pop(option, "") for option in ("sentinel_master", "master_name")]
    if all(names):
        raise wrong_url("sentinel_master and master_name are one option: leave one out", _SENTINEL)
    name = names[0] or names[1] or master_name
    if not name:
        raise wrong_url(
            "it does not name the primary. Add ?sentinel_master=NAME, or set master_name in the "
            "transport options of the broker",
            _SENTINEL,
        )
    of_sentinels: dict[str, Any] = dict(sentinel_kwargs or {})
    for option in ("username", "password"):
        if (given := query.pop(f"sentinel_{option}", None)) is not None:
            of_sentinels[option] = given
    fewest = str(query.pop("min_other_sentinels", None) or min_other_sentinels)
    if not (fewest.isascii() and fewest.isdigit()):
        raise wrong_url("min_other_sentinels must be a whole number", _SENTINEL)
    encrypted = _flag("ssl", query.pop("ssl", "no")) or any(n.startswith("ssl_") for n in query)
    scheme, rest = "rediss" if encrypted else "redis", f"?{urlencode(query)}" if query else ""
    primary = address_of(f"{scheme}://{user}primary{path}{rest}", ssl=ssl, **options)
    sentinels = tuple(_sentinel(host, of_sentinels) for host in hosts)
    return Sentinels(name, sentinels, primary, int(fewest))


def _sentinel(host: str, options: dict[str, Any]) -> Address:
    options = dict(options)
    scheme = "rediss" if options.pop("ssl", False) else "redis"
    address = address_of(f"{scheme}://{host}", ssl=None, **options)
    if "port" in address.options:
        return address
    return address.at(str(address.options.get("host") or "localhost"), SENTINEL_PORT)


def _split(url: str) -> tuple[str, list[str], str, dict[str, str]]:
    """User with its "@", %-encoded; hosts; path; query. As in a broker's URL, all but the hosts
    may stand at any of these."""
    user, path, query, hosts = "", "", "", []
    for part in url.partition("://")[2].split(";"):
        part = part.partition("://")[2] or part
        part, _, its_query = part.partition("?")
        authority, slash, its_path = part.partition("/")
        its_user, at, its_hosts = authority.rpartition("@")
        no_host = its_hosts.startswith(":") and ";" in url
        if no_host or "#" in part or "@" in its_query.partition("=")[0]:
            # Part of a password, which would be taken for a port or an option, and shown.
            raise _unquoted()
        hosts += [host for host in its_hosts.split(",") if host]
        user = user or its_user + at
        path = path or slash + its_path
        query = query or its_query
    return user, hosts or ["localhost"], path, dict(parse_qsl(query))
