"""Whether libpq will take the options of a URL, asked without a connection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from .url_check import arguments_of, check_names, wrong, wrong_value

if TYPE_CHECKING:
    from sqlalchemy import Dialect

    from .options import Options

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
