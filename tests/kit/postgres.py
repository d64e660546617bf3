"""PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from typing import ClassVar

import psycopg

from tests.kit.server import HOST, Server, find_program

INSTALL = "apt-get install postgresql"
PROGRAMS = "/usr/lib/postgresql/*/bin"


class PostgresServer(Server):
    """A PostgreSQL server that does not wait for the disk.

    What it has committed survives SIGKILL of its processes (the kernel has the pages), and would
    not survive a power cut.
    """

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # does not wait for open connections

    def __init__(self) -> None:
        super().__init__()
        self._databases_made = 0

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@{HOST}:{self.port}/{database}"

    def fresh_url(self) -> str:
        """The URL of a new, empty database."""
        self._databases_made += 1
        name = f"test{self._databases_made}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def drop(self, url: str) -> None:
        """Drop a database made by ``fresh_url``, whoever is still connected to it."""
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        with psycopg.connect(
            host=HOST, port=self.port, user="postgres", dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _prepare(self) -> None:
        user = self._user()
        if user is not None:
            shutil.chown(self._home, user, user)
        done = subprocess.run(
            [
                find_program("initdb", install_command=INSTALL, also_in=PROGRAMS),
                *("--pgdata", str(self._home / "data")),
                *("--username", "postgres", "--auth", "trust"),
                *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ],
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd=self._home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")

    def _command(self) -> list[str]:
        program = find_program("postgres", install_command=INSTALL, also_in=PROGRAMS)
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "off",
            "full_page_writes": "off",
            "autovacuum_naptime": "5s",
        }
        arguments = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [program, "-D", "data", *arguments]

    def _user(self) -> str | None:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in names else "nobody"

    def _answers(self) -> bool:
        data_directory = self.execute("SHOW data_directory")[0][0]
        return data_directory == str(self._home / "data")
