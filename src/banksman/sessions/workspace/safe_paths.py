"""Resolve paths that must stay inside a root, without races against concurrent changes.

**The kernel never gets a whole path.** It gets a single name at a time, relative to a folder that
is held open, with O_NOFOLLOW. So no gap exists between a check and a use. The folder that was found
is held open. If it is swapped for a link a moment later, the held folder is still the one that was
checked. Links are read and resolved here, as text that is walked like the rest. A link may lead
anywhere inside the root, by a relative or an absolute path, and nowhere else. `..` returns to the
folder from which the walk came. The folder's `..` entry is never used, because the folder may have
been moved.

A path is refused because of its target's place, and not because of the target. Nothing outside the
root is looked at, so the answer does not reveal whether a file exists there.

**Limits.** A hard link counts as a file of its folder. A folder that is moved out of the root while
this code holds it is still used. A mount below the root counts as inside.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from banksman.errors import BanksmanError, Closed, MachineError, NotFound, Refused, UsageError

# The limit of the kernel.
LINKS_MAX = 40
# A name that changes during the walk is looked up again. A process that changes it this often does
# so deliberately.
ATTEMPTS_MAX = 40
# Each folder on the path is held open. No project is this deep, and a hostile path must not use up
# all file descriptors.
FOLDERS_MAX = 128
# The kernel's limit for a path (PATH_MAX). The kernel cannot check it, as it never gets the path.
PATH_BYTES_MAX = 4096
SHOWN_CHARS_MAX = 200

# With O_PATH a folder need not be readable to be traversed. Without that flag (macOS) it must be.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO)

Result = TypeVar("Result")


class PathChanged(Exception):
    """A path component was replaced during the walk. The caller walks the path again."""


class Folder:
    """Folder that is held open by an owned file descriptor.

    The holder must close it, in any thread.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Prevents a close, and the reuse of the fd for another file, while a thread duplicates it.
        # No other call is made under the lock.
        self._lock = threading.Lock()

    def dup(self) -> int:
        """Return a new file descriptor of the folder, which the caller must close."""
        with self._lock:
            if self.fd < 0:
                raise Closed("the session's process has ended, and its workspace is closed")
            return os.dup(self.fd)

    def close(self) -> None:
        """Close the folder. May be called again."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)


class Root(Struct, frozen=True):
    """A session's folder, as it was when it was opened.

    Another folder that later takes its path is not used.
    """

    path: str
    folder: Folder
    # The allowed beginnings of an absolute path: the path as it was given, and the real path, which
    # a program inside the folder gets from the kernel.
    beginnings: tuple[tuple[str, ...], ...]

    def below(self, path: str) -> list[str] | None:
        """Return the components below the root; None if an absolute path leads elsewhere."""
        names = _names(path)
        for beginning in self.beginnings:
            if tuple(names[: len(beginning)]) == beginning:
                return names[len(beginning) :]
        return None


def open_root(path: str) -> Root:
    """Open a session's folder as a root."""
    path = os.path.abspath(path)
    try:
        folder = Folder(os.open(path, _FOLDER))
    except OSError as exc:
        raise refusal("work in", path, exc) from exc
    return Root(path, folder, (tuple(_names(path)), tuple(_names(os.path.realpath(path)))))


def check(root: Root, path: object) -> str:
    """Return the agent's path if it is an absolute and valid path, or raise `UsageError`."""
    if not isinstance(path, str) or not path:
        raise UsageError(f"a path cannot be {path!r:.60}", hint="use an absolute path")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as exc:
        hint = "use text that can be encoded"
        raise UsageError(f"a path cannot be {shown(path)}", hint=hint) from exc
    if b"\0" in encoded or len(encoded) > PATH_BYTES_MAX:
        hint = f"use at most {PATH_BYTES_MAX} bytes without NUL"
        raise UsageError(f"a path cannot be {shown(path)}", hint=hint)
    if not path.startswith("/"):
        hint = f"use a path that begins with {root.path}"
        raise UsageError(f"the path {shown(path)} is not absolute", hint=hint)
    return path


def at(
    root: Root, path: str, act: Callable[[int, str], Result], *, creates: bool = False
) -> Result:
    """Walk to a file and return the result of `act(folder, name)`.

    `folder`: the open folder of the file. `name`: the file's name in it, which is not a link. If it
    has become a link meanwhile, `act` raises `PathChanged` and the walk is repeated. `creates`:
    create missing folders.
    """
    if path.endswith("/"):
        hint = "end the path with the name of a file"
        raise UsageError(f"{shown(path)} is the path of a folder", hint=hint)
    for _ in range(ATTEMPTS_MAX):
        walk = _Walk(root, path, creates=creates)
        try:
            name = walk.to_file()
            return act(walk.here, name)
        except PathChanged:
            continue
        finally:
            walk.close()
    raise _restless(path)


def open_folder(root: Root, path: str) -> Folder:
    """Walk to a folder inside the root and return it opened."""
    walk = _Walk(root, path)
    try:
        walk.to_folder()
        return Folder(walk.take())
    finally:
        walk.close()


class _Walk:
    """Walk of one path through the root, component by component."""

    def __init__(self, root: Root, path: str, *, creates: bool = False) -> None:
        self._root = root
        self._path = path
        self._creates = creates
        self._links = 0
        self._attempts = 0
        # Open folders from the root to the current folder. `..` returns along this list.
        self._folders: list[int] = []
        # Remaining components, in reverse order.
        self._ahead: list[str] = []
        self._go_to(path)

    @property
    def here(self) -> int:
        return self._folders[-1]

    def take(self) -> int:
        """Return the current folder, which the caller must close."""
        return self._folders.pop()

    def close(self) -> None:
        while self._folders:
            os.close(self._folders.pop())

    def to_file(self) -> str:
        """Walk to the folder of a file and return the file's name in it."""
        while self._ahead:
            name = self._ahead.pop()
            if self._ahead or name == "..":
                self._enter(name)
                continue
            target = self._link(name)
            if target is None:
                return name
            self._follow(target)
        raise UsageError(f"{shown(self._path)} is a folder", hint="use the path of a file")

    def to_folder(self) -> None:
        while self._ahead:
            self._enter(self._ahead.pop())

    def _go_to(self, path: str) -> None:
        """Restart at the root with an absolute path."""
        names = self._root.below(path)
        if names is None:
            raise self._outside()
        self.close()
        try:
            self._folders.append(self._root.folder.dup())
        except OSError as exc:
            raise refusal("find", self._path, exc) from exc
        self._ahead += reversed(names)

    def _enter(self, name: str) -> None:
        if name == "..":
            if len(self._folders) == 1:
                raise self._outside()
            os.close(self._folders.pop())
            return
        if len(self._folders) >= FOLDERS_MAX:
            hint = f"use at most {FOLDERS_MAX} folders"
            raise UsageError(f"{shown(self._path)} is too deep", hint=hint)
        try:
            self._folders.append(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.here))
            self._attempts = 0
        except FileNotFoundError as exc:
            if not self._creates:
                raise refusal("find", self._path, exc) from exc
            self._create(name)
            self._look_again(name, exc)
        except OSError as exc:
            # The name is a link, or it is not a folder.
            if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise refusal("find", self._path, exc) from exc
            target = self._link(name)
            if target is not None:
                self._follow(target)
            else:
                self._look_again(name, exc)

    def _create(self, name: str) -> None:
        try:
            os.mkdir(name, dir_fd=self.here)
        except FileExistsError:
            pass  # Another process created the name first. The next step examines it.
        except OSError as exc:
            raise refusal("create the folders of", self._path, exc) from exc

    def _look_again(self, name: str, exc: OSError) -> None:
        """Look up a name again that was just created, or that was a link and then was not.

        A plain file also ends up here. It is still a plain file after the last attempt, and the
        walk fails.
        """
        self._attempts += 1
        if self._attempts > ATTEMPTS_MAX:
            raise refusal("find", self._path, exc) from exc
        self._ahead.append(name)

    def _link(self, name: str) -> str | None:
        """Return the target of a link; None for anything else and for a missing name."""
        try:
            return os.readlink(name, dir_fd=self.here)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                return None
            raise refusal("find", self._path, exc) from exc

    def _follow(self, target: str) -> None:
        self._links += 1
        if self._links > LINKS_MAX:
            message = f"{shown(self._path)} goes through more than {LINKS_MAX} links"
            raise UsageError(message, hint="check the links for a loop")
        if target.startswith("/"):
            self._go_to(target)
        else:
            self._ahead += reversed(_names(target))

    def _outside(self) -> BanksmanError:
        message = f"{shown(self._path)} is not inside the session's folder"
        return Refused(message, hint=f"use a path below {self._root.path}")


def refusal(verb: str, path: str, exc: OSError) -> BanksmanError:
    """Convert an error of the kernel to an error for the agent."""
    why = os.strerror(exc.errno) if exc.errno else str(exc)
    message = f"cannot {verb} {shown(path)}: {why}"
    if exc.errno in _NO_ROOM:
        return MachineError(message, number=exc.errno)
    return NotFound(message) if isinstance(exc, FileNotFoundError) else UsageError(message)


def shown(path: str) -> str:
    """Return a path as a bounded text that can be sent, even with lone surrogates."""
    return path[:SHOWN_CHARS_MAX].encode(errors="backslashreplace").decode()


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _restless(path: str) -> BanksmanError:
    hint = "try again when no other process changes it"
    return Refused(f"cannot open {shown(path)}: it keeps changing", hint=hint)
