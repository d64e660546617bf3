"""PgBouncer, which shares few connections to PostgreSQL among many clients."""

from __future__ import annotations

import shutil

import psycopg

from tests.support.postgres import PostgresServer
from tests.support.server import HOST, Server, find_program


class PgBouncerServer(Server):
    """In transaction mode: two statements of a client may run in two sessions of the server."""

    def __init__(self, postgres: PostgresServer, *, pool_size: int = 3) -> None:
        super().__init__()
        self._postgres = postgres
        self._pool_size = pool_size

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@{HOST}:{self.port}/{database}"

    def _prepare(self) -> None:
        self._prepare_ports()
        user = self._user()
        if user is not None:
            shutil.chown(self._home, user, user)

    def _prepare_ports(self) -> None:
        (self._home / "users.txt").write_text('"postgres" ""\n')
        (self._home / "pgbouncer.ini").write_text(
            f"""
            [databases]
            * = host={HOST} port={self._postgres.port} user=postgres
            [pgbouncer]
            listen_addr = {HOST}
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = trust
            auth_file = {self._home / "users.txt"}
            admin_users = postgres
            pool_mode = transaction
            default_pool_size = {self._pool_size}
            max_client_conn = 200
            """.replace("            ", "")
        )

    def _command(self) -> list[str]:
        program = find_program(
            "pgbouncer", install_command="apt-get install pgbouncer", also_in="/usr/sbin"
        )
        return [program, "pgbouncer.ini"]

    def _user(self) -> str | None:
        """PgBouncer refuses to run as root."""
        return self._postgres._user()

    def _answers(self) -> bool:
        with psycopg.connect(
            host=HOST, port=self.port, user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            found = connection.execute("SHOW data_directory").fetchone()
        [(expected,)] = self._postgres.execute("SHOW data_directory")
        return found is not None and found[0] == expected
