"""URLs that name several servers: the nodes of a cluster, or the sentinels of a primary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from celery_unique.exceptions import ConfigurationError

from .address import Address, address_of
from .url_options import IN_A_URL, LEFT_OUT, flag, unknown_option, wrong_url

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
