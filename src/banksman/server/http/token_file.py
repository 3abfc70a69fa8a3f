"""Token file: create and load the server's secret token, private to one user.

A client with the token may do anything that this server can do. `auth.py` checks the tokens of
requests. `make_private_folder` and `write_beside` also serve the discovery file.

Two servers that start at the same moment agree on one token. Each writes a token to a temporary
file, and only one of them can `link` it to the final name, because a link never replaces a file.
The other server reads the token of the first. So the file at the final name is always complete.

A file that other users may read, or could have written, is not secret. It is refused and not
repaired: another user may have read it before.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from banksman.errors import MachineError, UsageError
from banksman.folders import state_folder

TOKEN_BYTES = 32
FILE_BYTES_MAX = 4096
# Some file systems have no hard links (FAT, some network drives).
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def default_path() -> Path:
    """Return the token's path in the user's state folder, beside the store."""
    return state_folder() / "token"


def load_or_make(path: Path) -> str:
    """Return the token in this file, and create the file if it is missing.

    Raises `UsageError` if the file cannot hold a secret.
    """
    path = Path(os.path.abspath(path))
    try:
        make_private_folder(path.parent)
        token = _load(path)
        if token is None:
            _make(path)
            token = _load(path)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO):
            raise MachineError(
                f"cannot store the token in {path}: {exc.strerror}", number=exc.errno
            ) from exc
        hint = "make it readable and writable by this user, or set token_file to another path"
        raise UsageError(
            f"cannot store the token in {path}: {exc.strerror or exc}", hint=hint, path=str(path)
        ) from exc
    if token is None:
        raise UsageError(
            f"cannot create the token file {path}: another process keeps deleting it",
            hint="set token_file to another path",
        )
    return token


def is_same(a: str, b: str) -> bool:
    """Compare two texts in constant time, whatever they contain and however long they are."""
    return hmac.compare_digest(
        *(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (a, b))
    )


# -- private files -------------------------------------------------------------------------------
def make_private_folder(folder: Path) -> None:
    """Create a folder for this user only, if it is missing.

    Raises `UsageError` if it exists and other users could replace files in it.
    """
    missing: list[Path] = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        with suppress(FileExistsError):  # Another process may create it at the same moment.
            os.mkdir(one, 0o700)
        folder = one
    found = os.stat(folder)
    is_writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.geteuid(), 0) or is_writable:
        hint = f"run `chmod 700 {folder}` as its owner, or use another folder"
        raise UsageError(
            f"cannot use {folder}: other users can replace files in it", hint=hint, path=str(folder)
        )


def write_beside(path: Path, data: bytes) -> Path:
    """Write a new private file in the same folder, under a unique name, and return its path."""
    beside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    fd = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)  # Independent of the umask.
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        os.unlink(beside)
        raise
    return beside


# -- token file ----------------------------------------------------------------------------------
def _make(path: Path) -> None:
    beside = write_beside(path, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
    try:
        with suppress(FileExistsError):  # Another server was first: its token is used.
            os.link(beside, path)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        _rename_if_absent(beside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _rename_if_absent(beside: Path, path: Path) -> None:
    """Rename the file unless the name is taken, for file systems without hard links.

    A lock of the folder makes the second server see the file of the first.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not os.path.lexists(path):
            os.rename(beside, path)
    finally:
        os.close(folder)


def read_private(path: Path, bytes_max: int) -> bytes | None:
    """Return the content of a private file; None if it does not exist.

    Raises `UsageError` if other users may have read or written it.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _refusal(
                path, "is a symbolic link", "remove it, or set token_file to where it points"
            ) from exc
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(
                path, "is not a regular file", "remove it, or set token_file to another path"
            )
        if found.st_uid != os.geteuid():
            raise _refusal(
                path,
                f"belongs to user {found.st_uid}",
                "remove it as that user, or set token_file to another path",
            )
        if found.st_mode & 0o077:
            raise _refusal(
                path,
                "is readable by other users",
                "remove it to get a new token; the old one may have leaked",
            )
        with open(fd, "rb", closefd=False) as file:
            data = file.read(bytes_max + 1)
    finally:
        os.close(fd)
    if len(data) > bytes_max:
        raise _refusal(path, f"is longer than {bytes_max} bytes", "remove it to get a new token")
    return data


def _load(path: Path) -> str | None:
    """Return the token; None if the file does not exist."""
    data = read_private(path, FILE_BYTES_MAX)
    if data is None:
        return None
    token = data.strip(b" \t\r\n")
    if not token:
        raise _refusal(path, "is empty", "remove it to get a new token")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise _refusal(
            path,
            "contains characters that a header cannot hold",
            "use visible ASCII without spaces, or remove it",
        )
    return token.decode()


def _refusal(path: Path, what: str, hint: str) -> UsageError:
    return UsageError(f"the token file {path} {what}", hint=hint, path=str(path))
