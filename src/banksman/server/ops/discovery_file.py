"""Where this server is, for whoever runs on the same machine as the same user: `server.json`, beside the store.

It is put there whole, and taken away only by who put it there. Between the look at whose it is and the removal another
server could put its own there; so whoever changes it has the folder locked, for the time of a few system calls. The
lock goes with its holder. A file whose process is dead is left by a server that was killed, and means nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from banksman.errors import MachineError
from banksman.server.http.token_file import make_private_folder, write_beside

NAME = "server.json"
# Whoever holds the lock longer was stopped in the middle of it, and may never go on.
LOCK_SECONDS_MAX = 1.0
_LOCK_AGAIN_SECONDS = 0.01
# On this machine one that is there answers at once.
LOOK_SECONDS_MAX = 0.5

log = logging.getLogger("banksman")

# What this process has put where. By what it says and not by the pid alone: in two containers that share a folder both
# servers may be process 1.
_announced: dict[str, bytes] = {}


def announce(folder: Path, url: str, socket_path: Path | None = None) -> None:
    """Say that a server of ours is at this URL, and has this socket for its own user. What another said before is
    replaced, unless that one is still there: clients of this user keep the server that they have."""
    if (other := _living(Path(os.path.abspath(folder)) / NAME)) is not None:
        log.warning(
            "! clients of this user find the server at %s; for this one they need --url %s and BANKSMAN_TOKEN",
            other,
            url,
        )
        return
    said = {"url": url, "pid": os.getpid(), "started": time.time()}
    text = json.dumps(said if socket_path is None else {**said, "socket": str(socket_path)}) + "\n"
    path = Path(os.path.abspath(folder)) / NAME
    try:
        make_private_folder(path.parent)
        beside = write_beside(path, text.encode())
        try:
            with _locked(path.parent):
                os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as exc:
        raise MachineError(f"cannot write {path}: {exc.strerror or exc}", number=exc.errno) from exc
    _announced[str(path)] = text.encode()


def withdraw(folder: Path) -> None:
    """Take it back, if it is still ours. Never raises: what is left says so by its dead pid."""
    path = Path(os.path.abspath(folder)) / NAME
    ours = _announced.pop(str(path), None)
    if ours is None:
        return
    try:
        with _locked(path.parent) as is_locked:
            if is_locked and path.read_bytes() == ours:
                path.unlink()
    except FileNotFoundError:
        pass
    except OSError as exc:
        log.warning("! %s could not be removed: %s", path, exc)


def _living(path: Path) -> str | None:
    """The address of another server that is announced there, and answers. Its process may be gone by now, and its pid
    another's; or its port."""
    try:
        said = json.loads(path.read_bytes())
        pid, address = int(said["pid"]), urlsplit(str(said["url"]))
        if pid != os.getpid():
            os.kill(pid, 0)
        with socket.create_connection((address.hostname or "", address.port or 0), LOOK_SECONDS_MAX):
            return str(said["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _locked(folder: Path) -> Generator[bool]:
    """Whether we have it. Without it an announcement is still whole; only a removal is not safe."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    # By asking again, since a lock that is waited for cannot be given up, and a server must be able to end.
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_AGAIN_SECONDS)
