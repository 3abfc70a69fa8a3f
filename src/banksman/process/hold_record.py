"""Private files beside the sockets of held processes, for the next host of each process.

A host that hands a process over writes the secret of the hold to a file. The log only has the name
of the hold, because viewers and the agent can read the log. The file has the mode 0600, in a folder
with the mode 0700. The next host reads the file, claims the process with the secret, and removes
the file. It is written before the keeper is asked to hold the process, so a process that is held
has a record, even if its host was killed in the middle of the hand-over.

A record is valid as long as the socket of its hold exists. `write` removes the records of missing
sockets, because a host may die before it has removed its file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from banksman import sockets
from banksman.errors import MachineError, NotFound
from banksman.folders import held_folder

SUFFIX = ".record"
# A secret, and for a command its options and its kept output.
RECORD_BYTES_MAX = 256 << 20
_PART = ".part"


def write(name: str, record: bytes) -> None:
    """Write the record of a hold. `name`: the name of its socket.

    Raises `MachineError` if the file cannot be written.
    """
    assert len(record) <= RECORD_BYTES_MAX
    sweep()
    path, part = _path(name), _path(name, _PART)
    try:
        # Of a host that was killed here.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        # The file gets its name once it is whole: a reader may list the folder at any moment.
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(record)
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
    except OSError as exc:
        message = f"cannot write the record of held process {name}: {exc.strerror}"
        hint = f"check the folder {held_folder()}"
        raise MachineError(message, number=exc.errno or 0, hint=hint) from exc


def read(name: str) -> bytes:
    """Return the record of a hold.

    Raises `NotFound` if there is none: another host has claimed the process, or the hold is over.
    """
    try:
        fd = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if os.fstat(fd).st_uid == os.geteuid():
                return file.read(RECORD_BYTES_MAX)
    except OSError:
        pass
    message = f"cannot take over process {name}: its record is not there"
    raise NotFound(message, hint="another host has it, or none claimed it in time")


def open_to_append(name: str) -> int:
    """Open a record that this host has written, and return its fd. Raises `MachineError`."""
    try:
        return os.open(_path(name), os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        message = f"cannot open the record of held process {name}: {exc.strerror}"
        raise MachineError(message, number=exc.errno or 0) from exc


def names() -> list[str]:
    """Return the names of the holds that have a record. Never raises."""
    return [_swap(file, SUFFIX, sockets.SUFFIX) for file in _files() if file.endswith(SUFFIX)]


def first_lines(*parts: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each hold that still exists, and the first line of its record.

    That line tells what is held. The rest of a record may be large. `parts`: leaves out the lines
    without all of these bytes. Never raises.
    """
    # A host with many held processes calls this several times for each of them. So a record is read
    # once, and the other calls are a listing of the folder. What is yielded is compared with the
    # file. The last check wakes the keeper.
    folder = str(held_folder())
    for path, (_inode, known) in _known_lines(folder).items():
        if all(part in known for part in parts):
            with contextlib.suppress(OSError):
                line = _line_of(path)
                name = _swap(path.rpartition("/")[2], SUFFIX, sockets.SUFFIX)
                if all(part in line for part in parts) and sockets.is_alive(f"{folder}/{name}"):
                    yield name, line


def first_line(name: str) -> bytes:
    """Return the first line of the record of a hold; empty if it has none. Never raises."""
    with contextlib.suppress(OSError):
        return _line_of(_path(name))
    return b""


# The inode and the first line of each record that was there at the last listing, by its path.
_Lines = dict[str, tuple[int, bytes]]
_lines: _Lines = {}


def _known_lines(folder: str) -> _Lines:
    """List the folder, and read the records that this process has not seen yet.

    A record may be written anew under its name. Its line changes with that, but not what it is of.
    """
    global _lines  # noqa: PLW0603
    before, now = _lines, _Lines()
    for file in _listed(folder):
        if file.endswith(SUFFIX):
            path = f"{folder}/{file}"
            known = before.get(path)
            if known is None:
                with contextlib.suppress(OSError):
                    known = _read_line(path)
            if known is not None:
                now[path] = known
    # Never changed in place: another thread may iterate over the old one.
    _lines = now
    return now


def _line_of(path: str) -> bytes:
    # Rows are only added to a file. One that is written anew is another file.
    known = _lines.get(path)
    if known is None or known[0] != os.stat(path).st_ino:
        known = _read_line(path)
    return known[1]


def _read_line(path: str) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_ino, file.readline(RECORD_BYTES_MAX)


def remove(name: str) -> None:
    """Remove the record of a hold. Never raises."""
    with contextlib.suppress(OSError):
        os.unlink(_path(name))


def sweep() -> None:
    """Remove the records of holds whose socket is gone. Never raises."""
    files = _files()
    held = {_swap(file, sockets.SUFFIX, "") for file in files if file.endswith(sockets.SUFFIX)}
    for file in files:
        stem, suffix = os.path.splitext(file)
        if suffix not in (SUFFIX, _PART) or stem in held:
            continue
        # A listing that was under way may miss a socket that is older than its record.
        if not os.path.exists(held_folder() / f"{stem}{sockets.SUFFIX}"):
            with contextlib.suppress(OSError):
                os.unlink(held_folder() / file)


def _files() -> list[str]:
    return sorted(_listed(str(held_folder())))


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _swap(name: str, old: str, new: str) -> str:
    assert name.endswith(old)
    return name.removesuffix(old) + new


def _path(name: str, suffix: str = SUFFIX) -> str:
    assert "/" not in name
    return f"{held_folder()}/{_swap(name, sockets.SUFFIX, suffix)}"
