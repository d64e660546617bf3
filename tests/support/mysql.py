"""MySQL, which Debian's stable releases do not have: ``make test-matrix`` fetches it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.mariadb import MariaDBServer
from tests.support.server import ServerNotInstalled
from tests.support.worker import REPOSITORY

PROGRAM = REPOSITORY / ".cache" / "mysql" / "usr" / "sbin" / "mysqld"
INSTALL = "scripts/fetch-debian .cache/mysql mysql-server-core"


class MySQLServer(MariaDBServer):
    """As its relative, but for the program and how an empty database is made."""

    def _prepare(self) -> None:
        command = [*self._program(), "--initialize-insecure"]
        done = subprocess.run(command, cwd=self._home, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"mysqld --initialize-insecure failed:\n{done.stdout}{done.stderr}")

    def _command(self) -> list[str]:
        settings = {
            "bind-address": "127.0.0.1",
            "port": str(self.port),
            "socket": str((self.directory or Path()) / "mysql.sock"),
            "pid-file": str((self.directory or Path()) / "mysql.pid"),
            "mysqlx": "OFF",
            "skip-log-bin": "",
            "max-connections": "200",
            "innodb-flush-log-at-trx-commit": "0",
            "innodb-buffer-pool-size": "64M",
            "performance-schema": "OFF",
        }
        arguments = [
            f"--{name}={value}" if value else f"--{name}" for name, value in settings.items()
        ]
        return [*self._program(), *arguments, *self._extra_args]

    def _program(self) -> list[str]:
        if not PROGRAM.exists():
            raise ServerNotInstalled("mysqld", INSTALL)
        root, home = PROGRAM.parents[2], self.directory or Path()
        return [
            str(PROGRAM),
            "--no-defaults",
            f"--basedir={root / 'usr'}",
            f"--datadir={home / 'data'}",
            f"--tmpdir={home}",
            "--secure-file-priv=",
            f"--lc-messages-dir={root / 'usr/share/mysql'}",
            # Another user could not read a checkout of root's.
            *(["--user=root"] if os.geteuid() == 0 else []),
        ]

    def _user(self) -> str | None:
        return None
