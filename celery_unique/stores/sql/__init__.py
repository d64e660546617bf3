"""The lock store on SQLite, PostgreSQL, MariaDB and MySQL, through SQLAlchemy Core."""

from .store import SqlStore

__all__ = ["SqlStore"]
