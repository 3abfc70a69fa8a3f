"""The SQLite engine of the log: one file, which several hosts of one machine may share."""

from banksman.store.sqlite.engine import SqliteLog

__all__ = ["SqliteLog"]
