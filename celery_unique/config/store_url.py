"""The URL of an app's lock store, with Celery's connection options of the same server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_unique.exceptions import ConfigurationError, nearest, one_of

from .settings import UniqueSettings, loaded_conf

__all__ = ["store_url"]

_WITH_DRIVERS = ("sqlite", "postgresql", "mysql", "mariadb")
_REDIS_SCHEMES = ("redis", "rediss", "redis+socket", "sentinel")

#: Other names of schemes, where the nearest spelling would mislead.
_MEANT = {
    "postgres": "postgresql",
    "psycopg": "postgresql",
    "unix": "redis",
    "inmemory": "memory",
    "locmem": "memory",
}


_NAME = re.compile(r"[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?")


def store_url(app: Any, settings: UniqueSettings) -> tuple[str, dict[str, Any]]:
    """Return the URL of the lock store and options for opening it.

    The options are those that Celery keeps outside the URL, where they are set:

    - ``ssl``: True or a mapping of ``ssl_*`` options, for a connection that is encrypted
    - ``key_prefix``: put before every key (``global_keyprefix``)
    - ``username``, ``password``: where the URL has none
    - ``credential_provider``: an object of redis-py, or the name of its class
    - ``master_name``, ``sentinel_kwargs``, ``min_other_sentinels``: for ``sentinel://``
    """
    if settings.store_url is not None:
        _check_scheme(settings.store_url)
        return settings.store_url, {}
    conf = loaded_conf(app)
    broker, backend = _first_url(conf.broker_write_url), _first_url(conf.result_backend)
    if _scheme(broker) in _REDIS_SCHEMES:
        return broker, _broker_options(conf)
    if _scheme(backend) in _REDIS_SCHEMES:
        return backend, {**_backend_credentials(conf, backend), **_backend_options(conf)}
    if _scheme(broker) == "memory":
        return "memory://", {}
    raise _nothing_to_derive_from(_kind(conf.broker_write_url), _kind(conf.result_backend))


def _kind(value: object) -> str:
    """The kind of a broker or backend, without its address."""
    if not value:
        return "not set"
    url = _first_url(value)
    # Backends may be given by a name, such as django-db, or by their class.
    return _scheme(url) or (url if _NAME.fullmatch(url) else "not a URL")


def _nothing_to_derive_from(broker: str, backend: str) -> ConfigurationError:
    return ConfigurationError(
        f"unique_store_url is not set, and neither the broker ({broker}) nor "
        f"the result backend ({backend}) is Redis. Set unique_store_url, for "
        "example to 'redis://localhost:6379/1', 'postgresql+psycopg://localhost/shop' or, "
        "if all processes are on one machine, 'sqlite:////var/lib/shop/unique.db'",
        setting="unique_store_url",
    )


def _check_scheme(url: str) -> None:
    from celery_unique.stores import BUILT_IN, known_schemes

    scheme = _scheme(url)
    # The part after a plus names a driver, which the store checks; only databases have some.
    plain = scheme.partition("+")[0]
    if scheme in BUILT_IN or scheme == "redis+socket":
        return  # first: the search for others reads every installed package
    if plain in _WITH_DRIVERS:
        return
    known = known_schemes()
    if scheme in known or (plain in known and plain not in BUILT_IN):
        return
    near = _MEANT.get(plain) or nearest(scheme, known) or nearest(plain, known)
    hint = f" Did you mean '{near}://'?" if near in known else ""
    raise ConfigurationError(
        f"unique_store_url: there is no lock store for {scheme}://.{hint} "
        f"Use {one_of(f'{name}://' for name in known)}",
        setting="unique_store_url",
    )


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower() if "://" in url else ""


def _first_url(value: object) -> str:
    """Return the first URL of a fail-over list: all processes must use the same store.

    The parts of a sentinel URL are one address, not alternatives.
    """
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        return ""
    if parts and _scheme(parts[0]) == "sentinel":
        return ";".join(parts)
    return parts[0] if parts else ""


def _broker_options(conf: Any) -> dict[str, Any]:
    return {
        **_ssl_options(conf.get("broker_use_ssl"), "broker_use_ssl"),
        **_transport_options(conf.get("broker_transport_options")),
    }


def _backend_options(conf: Any) -> dict[str, Any]:
    return {
        **_ssl_options(conf.get("redis_backend_use_ssl"), "redis_backend_use_ssl"),
        **_transport_options(conf.get("result_backend_transport_options")),
    }


def _backend_credentials(conf: Any, url: str) -> dict[str, Any]:
    provider = conf.get("redis_backend_credential_provider")
    if provider:
        return {"credential_provider": provider}
    if "@" in url:  # those of the URL win, as in Celery
        return {}
    credentials = {name: conf.get(f"redis_{name}") for name in ("username", "password")}
    return {name: value for name, value in credentials.items() if value}


def _ssl_options(value: object, setting: str) -> dict[str, Any]:
    if not value:
        return {}
    if value is True or isinstance(value, Mapping):
        return {"ssl": value}
    raise ConfigurationError(
        f"{setting}: for Redis it is a mapping of ssl_* options, or True. "
        "Correct it, or set unique_store_url",
        setting=setting,
    )


def _transport_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    options = options or {}
    renamed = {"key_prefix": options.get("global_keyprefix")}
    same = {
        name: options.get(name)
        for name in (
            *("master_name", "sentinel_kwargs", "min_other_sentinels"),
            "credential_provider",
        )
    }
    return {name: value for name, value in {**renamed, **same}.items() if value}
