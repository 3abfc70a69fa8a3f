"""Per-user Unix sockets: listen and connect without a token, and remove dead sockets.

A server, or a host that a verb of the CLI embeds, listens there. File permissions authenticate the
client: the folder is accessible to its user only (0700), and so is each socket from its first
moment (0600). In addition both sides check the peer's uid, which the kernel provides (`peer_uid`),
because a folder may be mounted, copied or opened by mistake. `connect` checks the server.
`server/http/auth.py` checks the client.

The address of a socket has room for 107 bytes, and a folder may have a longer path. So the folder
is opened, and the socket is named through the fd: `/proc/self/fd/N/name` is always short.

The socket of a killed process stays behind. The next process that uses the folder removes it, and
never removes a live socket. The kernel tells that no process listens (ECONNREFUSED). That is
trusted only for sockets of the current boot: the folder may be shared with another machine, whose
sockets look dead from here. A socket that is being created looks dead for a moment, too. So the
folder is locked while a socket is created or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Generator
from pathlib import Path

from banksman.errors import UsageError

BACKLOG = 1024
SUFFIX = ".sock"
# `struct sockaddr_un` of Linux has 108 bytes for a path and its terminator; other systems have 104.
ADDRESS_BYTES_MAX = 103
# A process that holds the lock for longer was stopped while it held it, and may never resume.
LOCK_SECONDS_MAX = 1.0
_LOCK_AGAIN_SECONDS = 0.01
# A live socket accepts connections immediately, but its queue may be full for a moment.
_CONNECT_AGAIN_SECONDS = 0.01
# A sweep connects to every socket of a folder. A host that hands over many processes creates as
# many sockets in a moment.
_SWEEP_SECONDS_MIN = 1.0


def listen_in(
    folder: Path, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[socket.socket, Path]:
    """Create a listening socket with a unique name in this folder; create the folder if missing.

    Raises `UsageError` if other users can change the folder; OSError if the socket cannot be
    created. Call `remove` before closing the socket.
    """
    _make_folder(folder)
    _sweep_at_times(folder)
    name = f"{_boot()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        # The socket file is created with this mode, so that other users can never open it.
        os.fchmod(listener.fileno(), 0o600)
        with _opened(folder) as fd, _locked(fd):
            listener.bind(_address(fd, folder, name))
            try:
                os.chmod(name, 0o600, dir_fd=fd)
                listener.listen(BACKLOG)
            except BaseException:
                os.unlink(name, dir_fd=fd)
                raise
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener, folder / name


def remove(path: Path) -> None:
    """Remove a socket of this process.

    Never raises: a leftover is dead, and the next process removes it.
    """
    with contextlib.suppress(OSError):
        os.unlink(path)


def connect(
    path: str | os.PathLike[str],
    seconds_max: float,
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> socket.socket:
    """Connect to a socket whose listener runs as this user or as root.

    Raises OSError; PermissionError if another user listens.
    """
    folder, name = os.path.split(os.path.abspath(path))
    peer = socket.socket(socket.AF_UNIX, kind)
    deadline = time.monotonic() + seconds_max
    try:
        peer.settimeout(seconds_max)
        # The folder is opened by name only: a user who may not list the folder may still know the
        # name of the socket.
        with _opened(Path(folder), getattr(os, "O_PATH", os.O_RDONLY)) as fd:
            while not _is_connected(peer, _address(fd, Path(folder), name)):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "the server does not accept the connection")
                time.sleep(_CONNECT_AGAIN_SECONDS)
        if not is_ours(uid := peer_uid(peer)):
            raise PermissionError(errno.EPERM, f"the server belongs to user {uid}")
    except BaseException:
        peer.close()
        raise
    return peer


def peer_uid(peer: socket.socket) -> int | None:
    """Return the uid of the peer, as the kernel knows it.

    None: this system does not provide it, and the permissions of the folder have to suffice.
    """
    if sys.platform != "linux":
        return None
    return _credentials(peer)[1]


def peer_pid(peer: socket.socket) -> int:
    """Return the pid of the peer; 0: a process outside of this container. Linux only."""
    return _credentials(peer)[0]


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", found)
    return pid, uid, gid


def is_ours(uid: int | None) -> bool:
    """Whether this uid is the current user or root. Root can do everything that this user can."""
    return uid is None or uid in (os.geteuid(), 0)


_swept: dict[Path, float] = {}


def _sweep_at_times(folder: Path) -> None:
    """Remove the sockets of dead processes, unless this process has just done so."""
    now = time.monotonic()
    if now - _swept.get(folder, -math.inf) >= _SWEEP_SECONDS_MIN:
        _swept[folder] = now
        sweep(folder)


def sweep(folder: Path) -> list[str]:
    """Remove the sockets of dead processes and return their names.

    Never raises. A socket that cannot be checked or removed stays.
    """
    removed: list[str] = []
    with contextlib.suppress(OSError), _opened(folder) as fd, _locked(fd) as is_locked:
        for name in os.listdir(folder) if is_locked else ():
            if (
                name.endswith(SUFFIX)
                and name.startswith(f"{_boot()}-")
                and not is_alive(folder / name)
            ):
                # The process may be exiting and remove its socket at the same time.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
                    removed.append(name)
    return removed


def is_alive(path: str | os.PathLike[str]) -> bool:
    """Whether a process listens there. False is certain."""
    try:
        connect(path, 0.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        # The listener is busy, belongs to another user, or has another kind of socket: the kernel
        # compares the kinds only if a process listens.
        return True
    return True


# -- the folder ----------------------------------------------------------------------------------
def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.stat(folder, follow_symlinks=False)
    is_others = found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or is_others:
        hint = f"remove {folder}; it is created again"
        message = f"cannot use {folder}: other users may change its content"
        raise UsageError(message, hint=hint, path=str(folder))
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.chmod(folder, 0o700)


@contextlib.contextmanager
def _opened(folder: Path, how: int = os.O_RDONLY) -> Generator[int]:
    fd = os.open(folder, how | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(fd: int) -> Generator[bool]:
    """Lock the folder and return whether that succeeded. The lock ends with the fd.

    Polls, because a blocking flock has no timeout.
    """
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    is_locked = False
    while not is_locked and time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            time.sleep(_LOCK_AGAIN_SECONDS)
        except OSError:
            break  # Not every file system has locks.
    yield is_locked


def _address(fd: int, folder: Path, name: str) -> str:
    whole = str(folder / name)
    if len(os.fsencode(whole)) <= ADDRESS_BYTES_MAX:
        return whole
    # Only Linux has this. Elsewhere the path is too long, and the system call reports that.
    return f"/proc/self/fd/{fd}/{name}" if sys.platform == "linux" else whole


def _is_connected(peer: socket.socket, address: str) -> bool:
    """Try to connect. False: the queue of the listener is full."""
    try:
        peer.connect(address)
    except BlockingIOError:
        return False
    return True


def _boot() -> str:
    """Return a short id of the current boot.

    All containers of a machine share it, as they share the kernel.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return "here"
