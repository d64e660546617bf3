"""PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import psycopg

from tests.support.server import HOST, Server, find_program

INSTALL = "apt-get install postgresql"
PROGRAMS = "/usr/lib/postgresql/*/bin"

#: How many databases rest before the first of them is used again. Making one takes the server as
#: long as many a test takes altogether.
REST = 5
EMPTY = """
DO $$
DECLARE name text;
BEGIN
    PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type = 'client backend';
    FOR name IN SELECT nspname FROM pg_namespace
        WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', name);
    END LOOP;
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
END $$
"""


class PostgresServer(Server):
    """A PostgreSQL server that does not wait for the disk.

    What it has committed survives SIGKILL of its processes (the kernel has the pages), and would
    not survive a power cut.
    """

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # does not wait for open connections

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        self._databases_made = 0
        self._given_back: deque[str] = deque()

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@{HOST}:{self.port}/{database}"

    def fresh_url(self) -> str:
        """The URL of an empty database, to which no test of late is still writing."""
        if len(self._given_back) > REST:
            return self.url_of(self._given_back.popleft())
        self._databases_made += 1
        name = f"test{self._databases_made}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def give_back(self, url: str) -> None:
        """Empty a database of ``fresh_url``, whoever is still connected to it."""
        name = url.rpartition("/")[2]
        self.execute(EMPTY, name)
        self._given_back.append(name)

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
            **self._settings,
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
