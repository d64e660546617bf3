"""Whether PyMySQL will take what a URL says, asked without a connection."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .url_check import arguments_of, check_names, wrong, wrong_value

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

    from .options import Options

#: Arguments that are no text, or that the store decides, so that a URL cannot say them.
NOT_IN_A_URL = frozenset(
    {
        *("conv", "cursorclass", "auth_plugin_map", "ssl", "defer_connect", "autocommit"),
        *("max_allowed_packet", "binary_prefix", "named_pipe", "port", "passwd", "db"),
    }
)
#: SQLAlchemy puts these, and ``ssl_ca``, ``ssl_cert`` and ``ssl_key``, into PyMySQL's ``ssl``.
ONLY_SQLALCHEMYS = ("ssl_capath", "ssl_cipher", "ssl_check_hostname")
#: PyMySQL would take the word "false" for true.
FLAGS = ("ssl_disabled", "ssl_verify_identity")
FILES = ("ssl_ca", "ssl_capath", "ssl_cert", "ssl_key", "read_default_file")

_WORDS = {"true": True, "1": True, "false": False, "0": False}
_VERIFY = ("none", "0", "false", "no", "optional", "required", "1", "true", "yes")


def pymysql_flags(url: URL) -> dict[str, bool]:
    """What must be given beside the URL, for in it everything is text."""
    flags = {}
    for name in FLAGS:
        if name in url.query:
            if (word := str(url.query[name]).lower()) not in _WORDS:
                raise wrong_value(name, "true or false")
            flags[name] = _WORDS[word]
    return flags


def check_pymysql(dialect: Dialect, options: Options, own: Collection[str]) -> None:
    url = options.url
    connection_class = dialect.loaded_dbapi.connections.Connection
    arguments = set(inspect.signature(connection_class.__init__).parameters) - {"self"}
    check_names(url, "PyMySQL", {*arguments - NOT_IN_A_URL, *ONLY_SQLALCHEMYS}, own)
    _check_database(url, options.table)
    _check_tls(url)
    _check_password(arguments_of(dialect, url).get("password", ""))
    _try(connection_class, dialect, url)


def _check_database(url: URL, table: str) -> None:
    elsewhere = url.query.keys() & {"database", "read_default_file", "read_default_group"}
    if not (url.database or elsewhere or "." in table):
        raise wrong("it names no database: write it as mysql+pymysql://HOST:3306/DATABASE")


def _check_tls(url: URL) -> None:
    verify = sorted(name for name in url.query if name.startswith("ssl_verify_"))
    if verify and url.query.keys() & {"ssl_ca", "ssl_cert", "ssl_key", *ONLY_SQLALCHEMYS}:
        # PyMySQL would forget the others for it.
        raise wrong(
            f"{verify[0]} does not go with other options of TLS. Leave it out: with ssl_ca the "
            "server and its name are verified, and ssl_check_hostname=false leaves out the name: "
            "write that in its place"
        )
    if str(url.query.get("ssl_verify_cert", "none")).lower() not in _VERIFY:
        raise wrong_value("ssl_verify_cert", "true or false")
    for name in FILES:
        if name in url.query and not Path(str(url.query[name])).expanduser().exists():
            raise wrong_value(name, "the path of a file that is on this machine")


def _check_password(password: str) -> None:
    try:
        password.encode("latin1")
    except UnicodeEncodeError:
        # Not the character, which the error would tell.
        raise wrong(
            "the password has a character that PyMySQL cannot send. Use one of Latin-1 characters"
        ) from None


def _try(connection_class: Any, dialect: Dialect, url: URL) -> None:
    """Let it look at each option by itself, to tell which it is, and then at all of them."""
    for name, value in url.query.items():
        # A certificate and its key are nothing without each other.
        if name not in ("ssl_cert", "ssl_key") and not _takes(
            connection_class, dialect, url.set(query={name: value})
        ):
            raise wrong_value(name, "one that PyMySQL takes")
    if not _takes(connection_class, dialect, url):
        raise wrong(
            "PyMySQL does not take its options together, such as ssl_cert and ssl_key: write "
            "those that belong to each other"
        )


def _takes(connection_class: Any, dialect: Dialect, url: URL) -> bool:
    given = {**arguments_of(dialect, url), **pymysql_flags(url), "password": ""}
    try:
        connection_class(**given, defer_connect=True)  # connects to nothing
    except Exception:  # noqa: BLE001  whatever it is, it is because of these
        return False
    return True
