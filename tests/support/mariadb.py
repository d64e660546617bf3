"""MariaDB."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pymysql

from tests.support.server import HOST, Server, find_program

INSTALL = "apt-get install mariadb-server"


class MariaDBServer(Server):
    """A MariaDB server that does not wait for the disk.

    What it has committed survives SIGKILL (the kernel has the pages), and would not survive a
    power cut. Anybody on this machine is root on it, without a password.
    """

    def __init__(self, *, extra_args: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._extra_args = extra_args
        self._databases_made = 0

    @property
    def url(self) -> str:
        return self.url_of("test")

    def url_of(self, database: str) -> str:
        return f"mysql+pymysql://root@{HOST}:{self.port}/{database}"

    def fresh_url(self) -> str:
        """The URL of a new, empty database."""
        self._databases_made += 1
        name = f"test{self._databases_made}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]}")

    def execute(self, statement: str, database: str | None = None) -> list[tuple[object, ...]]:
        connection = pymysql.connect(
            host=HOST, port=self.port, user="root", database=database, autocommit=True
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def _prepare(self) -> None:
        user = self._user()
        if user is not None:
            shutil.chown(self._home, user, user)
        done = subprocess.run(
            [
                find_program("mariadb-install-db", install_command=INSTALL),
                *("--no-defaults", f"--datadir={self._home / 'data'}"),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *([f"--user={user}"] if user else []),
            ],
            cwd=self._home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise RuntimeError(f"mariadb-install-db failed:\n{done.stdout}{done.stderr}")

    def _command(self) -> list[str]:
        settings = {
            "datadir": "data",
            # Not /tmp: a server that starts deletes the temporary tables of others there.
            "tmpdir": "data",
            "bind-address": HOST,
            "port": str(self.port),
            "socket": "mariadb.sock",
            "pid-file": "mariadb.pid",
            "max-connections": "200",
            # Written at each commit, which survives the server's death, and not synced to the disk.
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-flush-method": "nosync",
            "innodb-buffer-pool-size": "64M",
        }
        home = self.directory or Path()
        for name in ("datadir", "tmpdir", "socket", "pid-file"):
            settings[name] = str(home / settings[name])
        program = find_program("mariadbd", install_command=INSTALL, also_in="/usr/sbin")
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        return [program, "--no-defaults", *arguments, *self._extra_args]

    def _user(self) -> str | None:
        """MariaDB refuses to run as root."""
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "mysql" if "mysql" in names else "nobody"

    def _answers(self) -> bool:
        data_directory = Path(str(self.execute("SELECT @@datadir")[0][0]))
        return data_directory == self._home / "data"
