"""The lock store on SQLite and PostgreSQL, through SQLAlchemy Core."""

from .store import SqlStore

__all__ = ["SqlStore"]
