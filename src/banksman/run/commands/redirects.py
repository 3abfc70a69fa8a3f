"""Where a command's stdout and stderr go: checked at the call, opened when the command is started.

The names are those of `subprocess`, with one difference. There `None` means inherited; here it has always meant
captured, so inherited is the word "inherit", as for `stdin`.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any, Literal, Protocol

from banksman.errors import UsageError
from banksman.run.child.launch import Target


class HasFileno(Protocol):
    def fileno(self) -> int: ...


# An int is an fd, or `subprocess.PIPE`, `DEVNULL` or `STDOUT`; a text other than "inherit" is the path of a file.
Redirect = int | Literal["inherit"] | str | os.PathLike[str] | HasFileno | None
HINT = 'None, subprocess.DEVNULL, "inherit", a path, an open file or its fd; for stderr subprocess.STDOUT, too'


def parse(name: str, wanted: Any) -> Target:
    """The target of one stream. `UsageError` for what cannot be one, an fd that is closed included."""
    if wanted is None or (wanted == subprocess.PIPE and _is_int(wanted)):
        return "pipe"
    if wanted == "inherit":
        return _open_fd(name, wanted, 1 if name == "stdout" else 2)
    if _is_int(wanted):
        if wanted == subprocess.DEVNULL:
            return "null"
        if wanted == subprocess.STDOUT and name == "stderr":
            return "stdout"
        return _open_fd(name, wanted, wanted)
    path: Any = getattr(wanted, "__fspath__", lambda: wanted)()
    if isinstance(path, str | bytes) and path != "pipe":
        return _path(name, path)
    fileno: Any = getattr(wanted, "fileno", None)
    if callable(fileno):
        try:
            fd: Any = fileno()
        except (OSError, ValueError) as exc:
            raise UsageError(f"{name} cannot be {wanted!r:.60}: {exc}", hint="an open file of the system") from exc
        return _open_fd(name, wanted, fd)
    raise UsageError(f"{name} cannot be {wanted!r:.60}", hint=HINT)


def _is_int(wanted: Any) -> bool:
    return isinstance(wanted, int) and not isinstance(wanted, bool)


def _path(name: str, path: Any) -> bytes:
    encoded = os.fsencode(path)
    if not encoded or b"\0" in encoded:
        raise UsageError(f"{name} cannot be the path {path!r:.60}", hint=HINT)
    # The program may change its folder between the call and the start.
    return os.path.abspath(encoded)


def _open_fd(name: str, wanted: Any, fd: Any) -> int:
    try:
        os.fstat(fd)
    except (OSError, OverflowError, TypeError) as exc:
        raise UsageError(f"{name} cannot be {wanted!r:.60}: fd {fd} is not open", hint=HINT) from exc
    return fd
