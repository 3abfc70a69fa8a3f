"""Whether the files of a store are still those that were opened.

A file can be removed, moved or replaced under a process that has it open, and the kernel lets that process write on,
into what nobody can ever open again. SQLite does not look. So each group of commits looks before it is acknowledged.

The log (`-wal`) and its index (`-shm`) are looked at too. Whoever is the last to close a store folds the log into it
and removes both; but who is the last is told by locks, and a program that copies its own state folder drops those of
its own process (`owners.py` has the rule). Another host that then opens and closes the store takes itself for the last.

By `stat` only: to open one of these files, and close it again, would drop the locks as well.
"""

from __future__ import annotations

import os

from banksman.errors import StoreError
from banksman.store.sqlite.faults import MOVED


class Presence:
    """The files of the store at `path`, which is resolved, from the moment on at which they are noted."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Now that a connection has opened them for writing, and not before: where a file system has layers, a file
        gets another number by that."""
        for name in (self._path, f"{self._path}-wal", f"{self._path}-shm"):
            key = _key(name)
            if key is not None:
                self._files[name] = key

    @property
    def is_whole(self) -> bool:
        return all(_key(name) == key for name, key in self._files.items())

    def check(self) -> None:
        """`StoreError` if one of them is not at its path any more, or another one is. A few microseconds."""
        for name, key in self._files.items():
            found = _key(name)
            if found != key:
                what = "replaced" if found is not None else "removed"
                raise StoreError(f"{name} was {what} while it was open", hint=MOVED, path=self._path)


def _key(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
