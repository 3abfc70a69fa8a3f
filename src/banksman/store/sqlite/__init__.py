"""The SQLite engine of the log: one file, which several hosts of one machine may share."""

from banksman.store.sqlite.sqlite_log import SqliteLog

__all__ = ["SqliteLog"]
