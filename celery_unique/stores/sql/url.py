"""Whether libpq will take the options of a URL, asked without a connection."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError, install_command, one_of, shown, suggestion

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

#: libpq reads these numbers only once it has found the server.
NUMBERS = (
    *("connect_timeout", "tcp_user_timeout", "keepalives"),
    *("keepalives_idle", "keepalives_interval", "keepalives_count"),
)
#: Where to connect and as whom is no question of options, and the password is nobody's business.
_NOT_ASKED = (
    *("host", "hostaddr", "port", "service", "user", "dbname"),
    *("password", "passfile", "sslpassword"),
)

#: A directory that cannot be, for a file is there.
_NOWHERE = "/dev/null"


def check_psycopg(dialect: Dialect, options: Options, own: Collection[str]) -> None:
    url = options.url
    pq = dialect.loaded_dbapi.pq
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    check_names(url, "libpq", known, own)
    given = arguments_of(dialect, url)
    for name in NUMBERS:
        if name in given and not _is_number(given[name]):
            raise wrong_value(name, "a whole number")
    for port in filter(None, str(given.get("port", "")).split(",")):
        if not (_is_number(port) and 0 < int(port) < 65536):
            raise wrong_value("port", "a number from 1 to 65535")
    for address in filter(None, given.get("hostaddr", "").split(",")):
        if not _is_address(address):
            raise wrong_value("hostaddr", "an IP address, or a name as host")
    asked = {name: given[name] for name in url.query if name not in _NOT_ASKED}
    if asked and (complaint := _complaint(pq, asked)):
        raise wrong(f"libpq refuses an option: {complaint}. Write a value that its manual names")


def _is_number(value: Any) -> bool:
    try:
        int(value)
    except ValueError:
        return False
    return True


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _complaint(pq: Any, asked: Mapping[str, Any]) -> str:
    """What libpq says of these options, or nothing.

    It looks at them when it starts to connect, and there is no other way to have them looked at.
    So it is sent to a socket that cannot exist, whatever the environment says.
    """
    elsewhere = {**asked, "host": _NOWHERE, "hostaddr": "", "port": "5432"}
    text = " ".join(f"{name}='{_escaped(value)}'" for name, value in elsewhere.items())
    connection = pq.PGconn.connect_start(text.encode())
    said = connection.error_message.decode(errors="replace").strip()
    connection.finish()
    return "" if _NOWHERE in said or not said else str(said.splitlines()[0].rstrip("."))


def _escaped(value: Any) -> str:
    text = value if isinstance(value, str) else " ".join(value)
    return text.replace("\\", "\\\\").replace("'", "\\'")


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
    _check_mysql_database(url, options.table)
    _check_tls(url)
    _check_password(arguments_of(dialect, url).get("password", ""))
    _try(connection_class, dialect, url)


def _check_mysql_database(url: URL, table: str) -> None:
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


INSTALL = install_command("sql")

#: What a scheme is opened with. Only these drivers can be told a deadline for every wait.
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
DATABASES = {"postgresql": "PostgreSQL", "mysql": "MariaDB or MySQL", "sqlite": "SQLite"}

#: Options of one database alone.
ONLY_FOR = {"synchronous": "sqlite", "through_pooler": "postgresql"}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}(\.[A-Za-z_][A-Za-z0-9_]{0,49})?")


@dataclass(frozen=True, slots=True)
class Options:
    """Where the table is and how to get at it."""

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
        """The same for everyone who uses this table and namespace, and no secret in it."""
        url = self.url
        if url.get_backend_name() == "sqlite":
            place = os.path.realpath(url.database or "")
        else:
            port = url.port or PORTS[url.get_backend_name()]
            place = f"{(url.host or '').lower()}:{port}/{url.database or ''}"
        text = "\n".join((url.get_backend_name(), place, self.table, self.namespace))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_options(url: str, namespace: str, timeout_s: float, given: dict[str, Any]) -> Options:
    """Options stand in the URL's query or are given beside it; what is given wins."""
    parsed = _parsed(url)
    check_place(parsed)
    in_query = {name: parsed.query[name] for name in _READERS if name in parsed.query}
    parsed = parsed.difference_update_query(in_query)
    unknown = next((name for name in given if name not in _READERS), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store has no option {shown(unknown)}."
            f"{suggestion(unknown, _READERS)} Use {one_of(_READERS)}.",
            setting=SETTING,
        )
    if len(namespace) > 100:
        raise ConfigurationError(
            "unique_namespace is longer than 100 characters.", setting="unique_namespace"
        )
    if parsed.get_backend_name() == "mysql" and namespace != namespace.rstrip(" "):
        raise ConfigurationError(
            "unique_namespace ends with a space, which MariaDB and MySQL do not tell from none.",
            setting="unique_namespace",
        )
    chosen: dict[str, Any] = {
        name: _READERS[name](name, value) for name, value in {**in_query, **given}.items()
    }
    _check_database(parsed.get_backend_name(), chosen)
    options = Options(_resolved(parsed), namespace, timeout_s, **chosen)
    if options.url.get_backend_name() == "sqlite":  # the other drivers have options of their own
        check_names(options.url, "SQLite", (), own_options("sqlite"))
    return options


def own_options(backend: str) -> list[str]:
    return [name for name in _READERS if ONLY_FOR.get(name, backend) == backend]


def _check_database(backend: str, chosen: dict[str, Any]) -> None:
    for name, database in ONLY_FOR.items():
        if name in chosen and backend != database:
            raise ConfigurationError(
                f"{SETTING}: {name} is for {DATABASES[database]}, and this is "
                f"{DATABASES[backend]}: leave it out.",
                setting=SETTING,
            )


def _parsed(url: str) -> URL:
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs SQLAlchemy: {INSTALL}", setting=SETTING
        ) from error
    try:
        parsed = make_url(url)
        check_credentials(url, parsed)
        _check_blank(url)
        if "\0" in unquote(url):  # which libpq and SQLite take for its end
            raise ValueError
    except (ArgumentError, ValueError):
        # Neither its text nor the cause: a URL that was not understood may show its password.
        raise ConfigurationError(
            "unique_store_url is not a database URL: write sqlite:///locks.db, "
            "postgresql+psycopg://host:5432/database or mysql+pymysql://host:3306/database. "
            "Special characters in the user or password before the host must be percent-encoded.",
            setting=SETTING,
        ) from None
    driver = DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store cannot use {shown(parsed.drivername)}: write "
            "postgresql+psycopg://, mysql+pymysql:// or sqlite:///.",
            setting=SETTING,
        )
    return parsed.set(drivername=driver)


def _check_blank(url: str) -> None:
    """SQLAlchemy leaves out options without a value."""
    _, _, query = url.rpartition("?")
    if "?" not in url or "@" in query:  # then it is the rest of a password
        return
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            # After another "?", or an "&", it may be the rest of a password.
            hidden = url.count("?") > 1 or "password" in query
            told = "an option after the ?" if hidden else f"the option {shown(name)}"
            raise wrong(f"{told} has no value: write one, or leave it out")


def _resolved(url: URL) -> URL:
    """An absolute path: the file must not change when the process changes its directory."""
    if url.get_backend_name() != "sqlite":
        return url
    path = url.database or ""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs a file, as in sqlite:///locks.db: a database in "
            "memory is another one for every connection. Use memory:// for locks within one "
            "process.",
            setting=SETTING,
        )
    return url.set(database=str(Path(path).absolute()))


def _table(name: str, value: Any) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise _wrong(name, value, "a table name of letters, digits and _, or schema.table")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise _wrong(name, value, "true or false")


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not isinstance(value, bool) and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise _wrong(name, value, "a whole number above 0")


def _synchronous(name: str, value: Any) -> str:
    if isinstance(value, str) and value.lower() in ("normal", "full"):
        return value.lower()
    raise _wrong(name, value, "normal or full")


def _wrong(name: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: the option {name}={shown(value)} is wrong: write {wanted}.",
        setting=SETTING,
    )


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "table": _table,
    "create_table": _flag,
    "pool_size": _count,
    "synchronous": _synchronous,
    "through_pooler": _flag,
}

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
