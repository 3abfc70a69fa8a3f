"""Sockets of this user's own, by which a server or a verb can be asked without a token: who may open the folder is who.

The folder is for its user alone (0700), and so is each socket from its first moment (0600). Whoever is at the other end
is asked for as well, of the kernel (`peer_uid`), by both sides: a folder may be mounted, copied or opened by mistake.

A socket's address has room for 107 bytes, and folders may be deeper than that. So the folder is opened, and the socket
is named through the fd: `/proc/self/fd/N/name` is short wherever the folder is.

A socket whose process was killed stays behind. Whoever comes by removes it, and never one that lives. That nobody
listens is the kernel's word (ECONNREFUSED), and is believed of sockets of this very boot only: the folder may be shared
with another machine, whose sockets look dead from here. A socket that is being made looks dead, too, for a moment; so
the folder is locked for the time in which one is made or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
# `struct sockaddr_un` of Linux has 108 bytes for a path and its end; other systems have 104.
ADDRESS_BYTES_MAX = 103
# Whoever holds the lock longer was stopped in the middle of it, and may never go on.
LOCK_SECONDS_MAX = 1.0
_LOCK_AGAIN_SECONDS = 0.01
# One that lives takes connections at once; its queue may be full for a moment.
_CONNECT_AGAIN_SECONDS = 0.01


def listen_in(folder: Path) -> tuple[socket.socket, Path]:
    """A socket that listens, under a name of its own in this folder, which is made if it is missing.

    `UsageError` if the folder is not ours alone; OSError if there can be none. It is removed by `remove`, before it is
    closed.
    """
    _make_folder(folder)
    sweep(folder)
    name = f"{_boot()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode that the file is made with: there is no moment in which others could open it.
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
    """Take our own socket away. Never raises: what is left is dead, and the next one who comes removes it."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def connect(path: str | os.PathLike[str], seconds_max: float) -> socket.socket:
    """A connection to whoever listens there, which is our own user or root. OSError, PermissionError among it."""
    folder, name = os.path.split(os.path.abspath(path))
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + seconds_max
    try:
        peer.settimeout(seconds_max)
        # By its name alone: whoever may not list a folder may still know what is in it.
        with _opened(Path(folder), getattr(os, "O_PATH", os.O_RDONLY)) as fd:
            while not _is_connected(peer, _address(fd, Path(folder), name)):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "nobody takes the connection")
                time.sleep(_CONNECT_AGAIN_SECONDS)
        if not is_ours(uid := peer_uid(peer)):
            raise PermissionError(errno.EPERM, f"it belongs to the user {uid}")
    except BaseException:
        peer.close()
        raise
    return peer


def peer_uid(peer: socket.socket) -> int | None:
    """Who is at the other end, as the kernel has it; None: this system does not say, and the folder has to do."""
    if sys.platform != "linux":
        return None
    return _credentials(peer)[1]


def peer_pid(peer: socket.socket) -> int:
    """Which process has connected it; 0: one outside of our container. Linux only."""
    return _credentials(peer)[0]


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", found)
    return pid, uid, gid


def is_ours(uid: int | None) -> bool:
    """Root can do all that we can, with or without our leave."""
    return uid is None or uid in (os.geteuid(), 0)


def sweep(folder: Path) -> list[str]:
    """Remove what dead processes have left there: the names. Never raises; what cannot be told, or taken, stays."""
    removed: list[str] = []
    with contextlib.suppress(OSError), _opened(folder) as fd, _locked(fd) as is_locked:
        for name in os.listdir(folder) if is_locked else ():
            if name.endswith(SUFFIX) and name.startswith(f"{_boot()}-") and not is_alive(folder / name):
                # Its process may just be ending by itself.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
                    removed.append(name)
    return removed


def is_alive(path: Path) -> bool:
    """False: certainly nobody listens there."""
    try:
        connect(path, 0.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True  # Somebody, who is busy, or another user.
    return True


# -- the folder -------------------------------------------------------------------------------------------------------
def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.stat(folder, follow_symlinks=False)
    is_others = found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or is_others:
        hint = f"remove {folder}, and it is made anew"
        raise UsageError(f"others may change what is in {folder}", hint=hint, path=str(folder))
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
    """Whether we have it; it goes with the fd. By asking again, for a lock that is waited for cannot be given up."""
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
    # Only Linux has this; elsewhere the path is too long, and the system says so.
    return f"/proc/self/fd/{fd}/{name}" if sys.platform == "linux" else whole


def _is_connected(peer: socket.socket, address: str) -> bool:
    """False: the queue of who listens there is full."""
    try:
        peer.connect(address)
    except BlockingIOError:
        return False
    return True


def _boot() -> str:
    """Of this run of this machine; the same in all its containers, since they have one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return "here"
