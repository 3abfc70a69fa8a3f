"""Discovery file `server.json`: write it at the start of a server, and remove it at its end.

The file tells clients of the same user where this server listens. They read it in
`cli/client/discovery.py`. It lies in the state folder, beside the store. A rename puts the complete
file in place. Only the server that wrote the file removes it.

Another server could replace the file between the check of its content and its removal. So each
change happens under a lock of the folder, which lasts for a few system calls. The kernel releases
the lock when its holder dies. A file whose process is dead was left by a killed server, and clients
ignore it.
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
# A process that holds the lock longer was stopped (SIGSTOP), and may never resume.
LOCK_SECONDS_MAX = 1.0
_LOCK_AGAIN_SECONDS = 0.01
# A live server on this machine accepts a connection immediately.
LOOK_SECONDS_MAX = 0.5

log = logging.getLogger("banksman")

# Path to content of each file that this process wrote. The content identifies the writer; the pid
# does not suffice: in two containers that share a folder both servers may be process 1.
_announced: dict[str, bytes] = {}


def announce(folder: Path, url: str, socket_path: Path | None = None) -> None:
    """Write the discovery file with this URL and the user's socket.

    The file of a dead server is replaced. The file of a live server stays: clients of this user
    keep the server that they have.
    """
    if (other := _living(Path(os.path.abspath(folder)) / NAME)) is not None:
        log.warning(
            "another server of this user is announced at %s; "
            "clients of this one need --url %s and BANKSMAN_TOKEN",
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
    """Remove the discovery file if this process wrote it.

    Never raises: a file that stays behind is recognised by its dead pid.
    """
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
        log.warning("cannot remove %s: %s", path, exc)


def _living(path: Path) -> str | None:
    """Return the URL of the server that this file announces, if that server accepts connections.

    Both the process and the port are checked: each alone may have been reused.
    """
    try:
        said = json.loads(path.read_bytes())
        pid, address = int(said["pid"]), urlsplit(str(said["url"]))
        if pid != os.getpid():
            os.kill(pid, 0)
        with socket.create_connection(
            (address.hostname or "", address.port or 0), LOOK_SECONDS_MAX
        ):
            return str(said["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _locked(folder: Path) -> Generator[bool]:
    """Lock the folder, and yield whether that succeeded.

    Without the lock a new file is still complete; only a removal is unsafe.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    # Poll: a blocking `flock` cannot be given up, and a server must be able to exit.
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOCK_AGAIN_SECONDS)
