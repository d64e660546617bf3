"""What may follow the ``?`` of a Redis URL, and whether it can be meant.

redis-py takes any word for true, and finds a wrong file or cipher only when it connects, where
it would look as if the server were away.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote

from celery_unique.exceptions import ConfigurationError
from celery_unique.messages import one_of, shown, suggestion

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
