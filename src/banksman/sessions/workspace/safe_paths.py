"""Paths inside a root, and nowhere else, whatever the folders on the way are turned into while we look.

**The kernel is never given a path.** It is given one name at a time, in a folder that is held open, and told not to
follow links. So there is no moment between a check and a use: what was found is held, and a folder that is swapped for
a link a moment later is not the one that we hold. Links are read and followed here, as text that is walked like the
rest: a link may lead anywhere inside the root, by a relative path or an absolute one, and nowhere else. `..` goes back
to the folder that we came from, and never by what the folder itself says its parent is, for it may have been moved.

A path is refused for where it leads and not for what is there: outside the root nothing is looked at, so that nobody
learns from the answer whether it exists.

**Limits.** A hard link is a file of the folder it is in. A folder that was inside when we entered it, and is moved out
of the root while we hold it, is still the one we work in. A mount below the root is inside.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from banksman.errors import BanksmanError, Closed, MachineError, NotFound, Refused, UsageError

# As many as the kernel follows.
LINKS_MAX = 40
# What is looked at may change under us, and is then looked at again. Who can change it this often means to.
ATTEMPTS_MAX = 40
# Each folder on the way is held open. No project is as deep, and a hostile one must not take all our fds.
FOLDERS_MAX = 128
# The kernel's own limit for a path (PATH_MAX), which we never give it one to check.
PATH_BYTES_MAX = 4096
SHOWN_CHARS_MAX = 200

# A folder need not be readable to be gone through. Where there is no such flag (macOS) it has to be.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO)

Result = TypeVar("Result")


class PathChanged(Exception):
    """What was found is another thing by now. It is looked for again."""


class Folder:
    """A folder that is held open, by an fd that this owns. Whoever has it closes it, in whichever thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Protects `fd` from being closed, and given to another file, in the moment in which a thread copies it. Nothing
        # else is called while it is held.
        self._lock = threading.Lock()

    def dup(self) -> int:
        """The same folder, by an fd of the caller's own."""
        with self._lock:
            if self.fd < 0:
                raise Closed("the session's process is gone, and so is what it worked in")
            return os.dup(self.fd)

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)


class Root(Struct, frozen=True):
    """A session's folder, as it was when it was opened: another one that is put in its place later is not it."""

    path: str
    folder: Folder
    # How an absolute path into it may begin: as it was given, and as a program that is in it is told where it is.
    beginnings: tuple[tuple[str, ...], ...]

    def below(self, path: str) -> list[str] | None:
        """The names of an absolute path after the root's own, or None if it leads elsewhere."""
        names = _names(path)
        for beginning in self.beginnings:
            if tuple(names[: len(beginning)]) == beginning:
                return names[len(beginning) :]
        return None


def open_root(path: str) -> Root:
    path = os.path.abspath(path)
    try:
        folder = Folder(os.open(path, _FOLDER))
    except OSError as exc:
        raise refusal("work in", path, exc) from exc
    return Root(path, folder, (tuple(_names(path)), tuple(_names(os.path.realpath(path)))))


def check(root: Root, path: object) -> str:
    """A path as the agent gave it, if it is one."""
    if not isinstance(path, str) or not path:
        raise UsageError(f"a path cannot be {path!r:.60}", hint="text, and an absolute path")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as exc:
        raise UsageError(f"no path can be {shown(path)}", hint="text that can be encoded") from exc
    if b"\0" in encoded or len(encoded) > PATH_BYTES_MAX:
        raise UsageError(f"no path can be {shown(path)}", hint=f"at most {PATH_BYTES_MAX} bytes, and none of them NUL")
    if not path.startswith("/"):
        raise UsageError(f"the path {shown(path)} is not absolute", hint=f"it begins with {root.path}")
    return path


def at(root: Root, path: str, act: Callable[[int, str], Result], *, creates: bool = False) -> Result:
    """What `act(folder, name)` makes of a file's name in the folder that it is in: the name is no link, unless it was
    turned into one since, and then `act` raises `PathChanged` and is called again. `creates`: folders that are
    missing."""
    if path.endswith("/"):
        raise UsageError(f"{shown(path)} is the path of a folder", hint="a file's path ends with its name")
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
    walk = _Walk(root, path)
    try:
        walk.to_folder()
        return Folder(walk.take())
    finally:
        walk.close()


class _Walk:
    """One path on its way through the root, name by name."""

    def __init__(self, root: Root, path: str, *, creates: bool = False) -> None:
        self._root = root
        self._path = path
        self._creates = creates
        self._links = 0
        self._attempts = 0
        # From the root on, each held open: the way back.
        self._folders: list[int] = []
        # The names that are still to be gone, the next one last.
        self._ahead: list[str] = []
        self._go_to(path)

    @property
    def here(self) -> int:
        return self._folders[-1]

    def take(self) -> int:
        """The folder that we are in is the caller's to close from here on."""
        return self._folders.pop()

    def close(self) -> None:
        while self._folders:
            os.close(self._folders.pop())

    def to_file(self) -> str:
        """Go to the folder of a file; its name there is returned."""
        while self._ahead:
            name = self._ahead.pop()
            if self._ahead or name == "..":
                self._enter(name)
                continue
            target = self._link(name)
            if target is None:
                return name
            self._follow(target)
        raise UsageError(f"{shown(self._path)} is a folder", hint="the path of a file")

    def to_folder(self) -> None:
        while self._ahead:
            self._enter(self._ahead.pop())

    def _go_to(self, path: str) -> None:
        """Begin again at the root, with an absolute path."""
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
            raise UsageError(f"{shown(self._path)} is too deep", hint=f"at most {FOLDERS_MAX} folders")
        try:
            self._folders.append(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.here))
            self._attempts = 0
        except FileNotFoundError as exc:
            if not self._creates:
                raise refusal("find", self._path, exc) from exc
            self._create(name)
            self._look_again(name, exc)
        except OSError as exc:
            # A link, or no folder at all.
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
            pass  # Somebody was faster. Whatever it is, it is looked at.
        except OSError as exc:
            raise refusal("create the folders of", self._path, exc) from exc

    def _look_again(self, name: str, exc: OSError) -> None:
        """At a name that was just made, or was a link a moment ago and then none. Or it is a plain file, which is what
        it still is after so many times."""
        self._attempts += 1
        if self._attempts > ATTEMPTS_MAX:
            raise refusal("find", self._path, exc) from exc
        self._ahead.append(name)

    def _link(self, name: str) -> str | None:
        """What a link says, or None for what is no link, or not there."""
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
            raise UsageError(f"{shown(self._path)} goes through more than {LINKS_MAX} links", hint="do they go round?")
        if target.startswith("/"):
            self._go_to(target)
        else:
            self._ahead += reversed(_names(target))

    def _outside(self) -> BanksmanError:
        return Refused(
            f"{shown(self._path)} is not inside the session's folder", hint=f"only what is below {self._root.path}"
        )


def refusal(verb: str, path: str, exc: OSError) -> BanksmanError:
    """An error of the kernel's, for the agent to read."""
    why = os.strerror(exc.errno) if exc.errno else str(exc)
    message = f"cannot {verb} {shown(path)}: {why}"
    if exc.errno in _NO_ROOM:
        return MachineError(message, number=exc.errno)
    return NotFound(message) if isinstance(exc, FileNotFoundError) else UsageError(message)


def shown(path: str) -> str:
    """A path in words that can be sent: it may hold half a surrogate pair, or be of any length."""
    return path[:SHOWN_CHARS_MAX].encode(errors="backslashreplace").decode()


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _restless(path: str) -> BanksmanError:
    return Refused(f"{shown(path)} changes while it is looked at", hint="try again when nobody else works there")
