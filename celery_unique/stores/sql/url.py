"""The URL of the SQL lock store, and the validation of its options.

SQLAlchemy parses the URL, and the driver validates its own options, both without a connection: a
wrong URL is a ``ConfigurationError`` before the first statement. The error names the part that is
wrong, and never the value of a part that may contain a password.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError, install_command, one_of, shown, suggestion

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

SETTING = "unique_store_url"
INSTALL = install_command("sql")

#: Scheme -> driver. Only these drivers can bound every wait by a deadline.
DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+pymysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
}
PORTS = {"postgresql": 5432, "mysql": 3306}


@dataclass(frozen=True, slots=True)
class Options:
    """Address of the tables, and the options of the store."""

    url: URL
    namespace: str
    timeout_s: float
    table: str = "celery_unique_lock"
    create_table: bool = True
    pool_size: int = 10
    synchronous: str = "normal"
    through_pooler: bool = False

    @property
    def shown_url(self) -> str:
        plain = self.url.set(drivername=self.url.get_backend_name(), query={})
        return plain.render_as_string(hide_password=True)

    def fingerprint(self) -> str:
        """Equal for all processes that use this table and namespace; contains no secret."""
        url = self.url
        if url.get_backend_name() == "sqlite":
            place = os.path.realpath(url.database or "")
        else:
            port = url.port or PORTS[url.get_backend_name()]
            place = f"{(url.host or '').lower()}:{port}/{url.database or ''}"
        text = "\n".join((url.get_backend_name(), place, self.table, self.namespace))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_options(url: str, namespace: str, timeout_s: float, given: dict[str, Any]) -> Options:
    """Read the URL. Options may be in its query or in ``given``, which takes precedence."""
    parsed = _parsed(url)
    backend = parsed.get_backend_name()
    if len(namespace) > 100:
        raise ConfigurationError(
            "unique_namespace is longer than 100 characters.", setting="unique_namespace"
        )
    if backend == "mysql" and namespace != namespace.rstrip(" "):
        raise ConfigurationError(
            "unique_namespace ends with a space, which MariaDB and MySQL ignore in comparisons.",
            setting="unique_namespace",
        )
    in_query = {name: parsed.query[name] for name in _STORE_OPTIONS if name in parsed.query}
    chosen = {name: _read(name, value, backend) for name, value in {**in_query, **given}.items()}
    parsed = parsed.difference_update_query(in_query)
    if backend == "sqlite":
        parsed = _with_absolute_path(parsed)
        _check_names(parsed, "SQLite", ())
    return Options(parsed, namespace, timeout_s, **chosen)


def check_driver_options(options: Options) -> None:
    """Let the driver validate its part of the URL. Raises ImportError where it is missing."""
    url = options.url
    if url.get_backend_name() == "sqlite":
        return
    dialect_class: Any = url.get_dialect()
    dialect = dialect_class(dbapi=dialect_class.import_dbapi())
    driver, names, validate = _DRIVERS[url.get_backend_name()]
    _check_names(url, driver, names(dialect.loaded_dbapi))
    if driver == "PyMySQL":
        _check_mysql(url, options.table)
    if _refusal(dialect, validate, url):
        for part, alone in _parts(url):
            if reason := _refusal(dialect, validate, alone):
                raise wrong(
                    f"{part} has a wrong value: {driver} refuses it ({reason}). Write one that "
                    "its manual names"
                )
        raise wrong(
            f"{driver} refuses this combination of hosts, ports and options. Write a port for each "
            "host, or none, and options that go together, such as ssl_cert and ssl_key"
        )


def wrong(reason: str) -> ConfigurationError:
    return ConfigurationError(f"{SETTING}: {reason}.", setting=SETTING)


# -- options of the store ------------------------------------------------------------------------

_FLAG = {"true": True, "1": True, "false": False, "0": False}
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}(\.[A-Za-z_][A-Za-z0-9_]{0,49})?")
_COUNT = re.compile(r"0*[1-9][0-9]*")
_DATABASES = {"postgresql": "PostgreSQL", "mysql": "MariaDB or MySQL", "sqlite": "SQLite"}


def _table(value: Any) -> str | None:
    return value if isinstance(value, str) and _TABLE.fullmatch(value) else None


def _flag(value: Any) -> bool | None:
    return _FLAG.get(str(value).lower())


def _count(value: Any) -> int | None:
    return int(value) if _COUNT.fullmatch(str(value)) else None


def _synchronous(value: Any) -> str | None:
    return str(value).lower() if str(value).lower() in ("normal", "full") else None


#: name -> its value (None: wrong), the values that it can have, and the one database it is for.
_STORE_OPTIONS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "table": (_table, "a table name of letters, digits and _, or schema.table", ""),
    "create_table": (_flag, "true or false", ""),
    "pool_size": (_count, "a whole number above 0", ""),
    "synchronous": (_synchronous, "normal or full", "sqlite"),
    "through_pooler": (_flag, "true or false", "postgresql"),
}


def _read(name: str, value: Any, backend: str) -> Any:
    if name not in _STORE_OPTIONS:
        raise wrong(
            f"the SQL lock store has no option {shown(name)}.{suggestion(name, _STORE_OPTIONS)} "
            f"Use {one_of(_STORE_OPTIONS)}"
        )
    read, values, database = _STORE_OPTIONS[name]
    if database not in ("", backend):
        raise wrong(
            f"{name} is for {_DATABASES[database]}, and this is {_DATABASES[backend]}: leave it out"
        )
    found = read(value)
    if found is None:
        raise wrong(f"the option {name}={shown(value)} is wrong: write {values}")
    return found


# -- parts of the URL ----------------------------------------------------------------------------

#: A place and its options, where a user and password should be.
_QUERY_IN_PASSWORD = re.compile(r"/[^?]*\?[^=]*=")

#: Drivers accept these more than once: several hosts, and settings that are concatenated.
_REPEATABLE = ("host", "options")


def _parsed(text: str) -> URL:
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs SQLAlchemy: {INSTALL}", setting=SETTING
        ) from error
    try:
        url = make_url(text)
        _check_at_signs(text, url)
        _check_blank_options(text)
        if "\0" in unquote(text):  # libpq and SQLite end the text there
            raise ValueError
    except (ArgumentError, ValueError):
        # Without its text and its cause, which may show the password.
        raise ConfigurationError(
            "unique_store_url is not a database URL: write sqlite:///locks.db, "
            "postgresql+psycopg://host:5432/database or mysql+pymysql://host:3306/database. "
            "Special characters in the user or password before the host must be percent-encoded.",
            setting=SETTING,
        ) from None
    if url.drivername not in DRIVERS:
        raise wrong(
            f"the SQL lock store cannot use {shown(url.drivername)}: write "
            "postgresql+psycopg://, mysql+pymysql:// or sqlite:///"
        )
    url = url.set(drivername=DRIVERS[url.drivername])
    _check_place(url)
    return url


def _check_at_signs(text: str, url: URL) -> None:
    """Refuse an ``@`` that is not percent-encoded in a password, or that may hide one.

    SQLAlchemy ends the password at the first one: errors would show the rest of it as a host.
    """
    if url.get_backend_name() == "sqlite":
        return  # a path may contain one, and there is no password
    rest = text.partition("://")[2].replace("host=@", "host=")  # an abstract socket of Linux
    before, at, after = rest.partition("@")
    has_user = url.username is not None or url.password is not None
    if at and ("@" in after or not has_user or _QUERY_IN_PASSWORD.search(before)):
        raise wrong(
            "it has an @ that does not separate a user and password from the host. Write every @ "
            "in the user, the password and the options as %40"
        )


def _check_blank_options(text: str) -> None:
    """Refuse options without a value, which SQLAlchemy drops."""
    _, mark, query = text.rpartition("?")
    if not mark or "@" in query:  # the rest of a password
        return
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            # After another "?", or a "password", it may be the rest of a password.
            is_hidden = text.count("?") > 1 or "password" in query
            option = "an option after the ?" if is_hidden else f"the option {shown(name)}"
            raise wrong(f"{option} has no value: write one, or leave it out")


def _check_place(url: URL) -> None:
    """Refuse hosts and ports that drivers accept and fail to resolve or connect to."""
    if url.get_backend_name() == "sqlite" and (url.host or url.username or url.password):
        raise wrong(
            "what follows sqlite:// is a host, and SQLite has none. Write sqlite:///locks.db, or "
            "sqlite:////var/lib/shop/locks.db, with four slashes, for an absolute path"
        )
    hosts = url.query.get("host", ())
    in_query = hosts if isinstance(hosts, str) else ",".join(hosts)
    ports = (1 if url.port is None else url.port, *re.findall(r":(\d+)(?:,|$)", in_query))
    if any(not 0 < int(port) < 65536 for port in ports):
        raise wrong("the port must be a number from 1 to 65535: write it as HOST:PORT/DATABASE")
    try:
        for host in f"{url.host or ''},{in_query}".split(","):
            if not host.startswith(("/", "@")):  # a socket
                host.encode("idna")
    except UnicodeError:
        raise wrong(
            "the host is not a host name. Write it as HOST:PORT/DATABASE, with special characters "
            "in the user and password before it percent-encoded"
        ) from None


def _with_absolute_path(url: URL) -> URL:
    """The file stays the same when the process changes its working directory."""
    path = url.database or ""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise wrong(
            "the SQL lock store needs a file, as in sqlite:///locks.db: every connection to a "
            "database in memory has its own. Use memory:// for locks within one process"
        )
    return url.set(database=str(Path(path).absolute()))


def _check_names(url: URL, driver: str, allowed: Collection[str]) -> None:
    """Refuse options that neither the driver nor the store has, and those that are repeated."""
    database = "dbname" if "dbname" in allowed else "database"
    before = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    before[database] = url.database
    for name, value in url.query.items():
        if name not in allowed:
            raise _unknown(name, url, driver, allowed)
        if before.get(name):
            raise wrong(f"the option {name} repeats what precedes the ?: write it once")
        if not isinstance(value, str) and name not in _REPEATABLE:
            raise wrong(f"the option {name} is given more than once: write it once")


def _unknown(name: str, url: URL, driver: str, allowed: Collection[str]) -> ConfigurationError:
    # The rest of a password that is not percent-encoded looks like options.
    parts = (url.host or "", *url.query, *map(str, url.query.values()))
    is_hidden = "password" in url.query or any("@" in part for part in parts)
    backend = url.get_backend_name()
    own = [option for option in _STORE_OPTIONS if _STORE_OPTIONS[option][2] in ("", backend)]
    option = "" if is_hidden else f" {shown(name)}"
    near = "" if is_hidden else suggestion(name, (*own, *allowed))
    others = f", and the options of {driver} that a URL can contain" if allowed else ""
    return wrong(
        f"the option{option} after the ? is unknown.{near} Use {one_of(own)}{others}. Special "
        "characters in the user or password before the host must be percent-encoded"
    )


# -- validation by the driver --------------------------------------------------------------------


def _parts(url: URL) -> Iterator[tuple[str, URL]]:
    """Each part that a driver can refuse, and a URL with that part alone."""
    bare = url.set(query={}, password="")
    yield "the password", url.set(query={})
    for name, value in url.query.items():
        yield f"the option {name}", bare.set(query={name: value})


def _refusal(dialect: Dialect, validate: Callable[[Any, dict[str, Any]], None], url: URL) -> str:
    """The type of the error that SQLAlchemy or the driver raises for the URL; empty for none."""
    try:
        validate(dialect.loaded_dbapi, dict(dialect.create_connect_args(url)[1]))
    except Exception as error:  # noqa: BLE001  a driver raises any type
        return type(error).__name__
    return ""


#: libpq parses these after it has connected.
_NUMBERS = (
    *("connect_timeout", "tcp_user_timeout", "keepalives"),
    *("keepalives_idle", "keepalives_interval", "keepalives_count"),
)
#: Read from files, or secret: libpq needs them to connect only.
_NOT_VALIDATED = ("host", "hostaddr", "port", "service", "passfile", "password", "sslpassword")
#: A directory that cannot exist: it is a file.
_NOWHERE = "/dev/null"


def _names_of_libpq(psycopg: Any) -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


def _validate_psycopg(psycopg: Any, arguments: dict[str, Any]) -> None:
    """libpq validates options when it starts to connect: here to a socket that cannot exist."""
    for name in _NUMBERS:
        int(arguments.get(name, 0))
    for address in filter(None, arguments.get("hostaddr", "").split(",")):
        ip_address(address)
    names = _names_of_libpq(psycopg).difference(_NOT_VALIDATED)
    options = {
        name: value if isinstance(value, str) else " ".join(value)
        for name, value in arguments.items()
        if name in names
    }
    address = {"host": _NOWHERE, "hostaddr": "", "port": "5432"}  # overrides the environment
    probe = psycopg.conninfo.make_conninfo(**options, **address)
    connection = psycopg.pq.PGconn.connect_start(probe.encode())
    refused = _NOWHERE.encode() not in connection.error_message
    connection.finish()
    if refused:
        raise ValueError


#: Arguments that are not text, or that the store sets.
_NOT_IN_A_URL = frozenset(
    {
        *("conv", "cursorclass", "auth_plugin_map", "ssl", "defer_connect", "autocommit"),
        *("max_allowed_packet", "binary_prefix", "named_pipe", "port", "passwd", "db"),
    }
)
#: SQLAlchemy puts these, and ``ssl_ca``, ``ssl_cert`` and ``ssl_key``, into PyMySQL's ``ssl``.
_ONLY_SQLALCHEMYS = ("ssl_capath", "ssl_cipher", "ssl_check_hostname")

_VERIFY = ("none", "0", "false", "no", "optional", "required", "1", "true", "yes")
#: PyMySQL accepts any text for these, and reads "false" as true.
_WORDS: dict[str, dict[str, Any]] = {
    "ssl_disabled": _FLAG,
    "ssl_verify_identity": _FLAG,
    "ssl_verify_cert": {word: word for word in _VERIFY},
}


def _names_of_pymysql(pymysql: Any) -> set[str]:
    arguments = set(inspect.signature(pymysql.connections.Connection.__init__).parameters)
    return {*arguments - _NOT_IN_A_URL - {"self"}, *_ONLY_SQLALCHEMYS}


def _check_mysql(url: URL, table: str) -> None:
    elsewhere = url.query.keys() & {"database", "read_default_file", "read_default_group"}
    if not (url.database or elsewhere or "." in table):
        raise wrong("it names no database: write it as mysql+pymysql://HOST:3306/DATABASE")
    verify = sorted(name for name in url.query if name.startswith("ssl_verify_"))
    if verify and url.query.keys() & {"ssl_ca", "ssl_cert", "ssl_key", *_ONLY_SQLALCHEMYS}:
        raise wrong(
            f"with {verify[0]} PyMySQL ignores the other options of TLS. Leave it out: with ssl_ca "
            "the server and its name are verified. To verify only the server, write "
            "ssl_check_hostname=false"
        )


def with_flags(arguments: dict[str, Any]) -> dict[str, Any]:
    """PyMySQL's arguments with booleans for the flags, which in a URL are text."""
    found = {name: words for name, words in _WORDS.items() if name in arguments}
    return arguments | {n: words[str(arguments[n]).lower()] for n, words in found.items()}


def _validate_pymysql(pymysql: Any, arguments: dict[str, Any]) -> None:
    for path in (arguments.get("ssl", {}).get("capath"), arguments.get("read_default_file")):
        if path is not None:  # PyMySQL ignores one that does not exist
            Path(path).expanduser().stat()
    pymysql.connections.Connection(**with_flags(arguments), defer_connect=True)


#: database -> driver, the names of its options, and what validates their values.
_DRIVERS: dict[
    str, tuple[str, Callable[[Any], set[str]], Callable[[Any, dict[str, Any]], None]]
] = {
    "postgresql": ("libpq", _names_of_libpq, _validate_psycopg),
    "mysql": ("PyMySQL", _names_of_pymysql, _validate_pymysql),
}
