"""SQLite log engine: one file that several hosts of one machine can share."""

from banksman.store.sqlite.sqlite_log import SqliteLog

__all__ = ["SqliteLog"]
