"""Durable place of a webhook target in the log: one small file, replaced atomically.

The file lies in the state folder and belongs to one target and one store address. Its lock makes
one sender of several servers with the same store and the same target. The kernel drops the lock
when its holder dies. The lock is on a separate file, which is never replaced.

The file also has the identity of the store. A restored copy has the address of the store before it,
and another identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from pathlib import Path

import msgspec

from banksman.cluster.store_address import parse
from banksman.errors import UsageError
from banksman.server.http.token_file import make_private_folder, write_beside
from banksman.server.server_settings import ServerSettings

# How often a second server looks whether the first one has ended.
LOCK_AGAIN_SECONDS = 1.0

log = logging.getLogger("banksman.webhooks")


class StoredPlace(msgspec.Struct, frozen=True):
    """A place in a log. `store`: the identity of the store, see `Log.identity`."""

    position: str
    store: str


def address_of(settings: ServerSettings) -> str:
    """Return what tells the configured store from other ones, without credentials."""
    if not settings.is_clustered:
        return str(settings.store_file)
    address = parse(str(settings.store)).without_credentials
    return f"{','.join(sorted(address.servers))}/{address.prefix}"


class CursorFile:
    """The stored place of one target. Without a folder nothing is stored.

    `address`: see `address_of`. `identity`: see `Log.identity`.
    """

    def __init__(self, folder: Path | None, url: str, *, address: str, identity: str) -> None:
        # The URL may contain a key, so its hash names the file.
        name = hashlib.sha256(f"{address}\n{url}".encode()).hexdigest()[:32]
        self._identity = identity
        self._path = None if folder is None else folder / f"{name}.json"
        self._lock_fd: int | None = None
        self._saved: StoredPlace | None = None
        self._failed = False

    @property
    def is_locked(self) -> bool:
        """Whether this process may send."""
        return self._path is None or self._lock_fd is not None

    async def lock(self) -> None:
        """Wait until no other process sends for this target."""
        if self._path is None:
            return
        make_private_folder(self._path.parent)
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path.with_suffix(".lock"), flags, 0o600)
        try:
            # Not `flock`: a helper that was forked from this process would keep it.
            # A blocking `lockf` in a thread could not be cancelled.
            while not _try_lock(fd):  # noqa: ASYNC110
                await asyncio.sleep(LOCK_AGAIN_SECONDS)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def load(self) -> StoredPlace | None:
        """Return the stored place; None if there is none.

        Raises `OSError` if the file cannot be read, and `ValueError` if it is damaged.
        """
        if self._path is None:
            return self._saved
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            self._saved = msgspec.json.decode(text, type=StoredPlace)
        except msgspec.DecodeError as exc:
            raise ValueError(f"{self._path} is damaged") from exc
        return self._saved

    def save(self, position: str) -> None:
        """Store a position. After a failure the earlier one stays: events may be repeated."""
        place = StoredPlace(position, self._identity)
        if self._path is None or place == self._saved:
            return
        try:
            make_private_folder(self._path.parent)
            os.replace(write_beside(self._path, msgspec.json.encode(place)), self._path)
        except (OSError, UsageError) as exc:
            if not self._failed:
                log.warning("cannot store a webhook cursor, a restart repeats events: %s", exc)
            self._failed = True
            return
        self._saved, self._failed = place, False

    def close(self) -> None:
        """Release the lock."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
