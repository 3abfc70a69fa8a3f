"""Keywords of `subprocess.Popen` for the drop-in functions: supported, fixed, or refused.

- `launch_of` turns the supported keywords into a launch.
- A keyword whose value cannot differ here raises `ValueError` for any other value. An unknown
  keyword raises `TypeError`.
- `os_errors` raises failures of a start as the `OSError` that asyncio's functions raise. Banksman's
  error is its cause, and a note of it says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from banksman.errors import ProgramNotExecutable, ProgramNotFound, UsageError
from banksman.process.attributes import Become
from banksman.process.launch import Launch, prepare

Text = str | bytes
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class PopenKeywords(TypedDict, total=False):
    """The keywords of `subprocess.Popen`, with the same meaning."""

    executable: Path | None
    cwd: Path | None
    env: Mapping[str, str] | Mapping[bytes, bytes] | None
    umask: int
    user: str | int | None
    group: str | int | None
    extra_groups: Iterable[str | int] | None
    pass_fds: Iterable[int]
    close_fds: bool
    pipesize: int
    start_new_session: bool
    process_group: int | None
    # These have one value: see `_FIXED`.
    restore_signals: bool
    preexec_fn: None
    startupinfo: None
    creationflags: int
    shell: bool
    bufsize: int
    universal_newlines: bool
    text: bool | None
    encoding: None
    errors: None


_BYTES = "the streams carry bytes, as in asyncio; decode the data"
_WINDOWS = "it exists on Windows only"
# Keywords with the values that they may have, and the reason.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "restore_signals": ((True,), "the child always starts with the default signal handlers"),
    "process_group": ((None, -1, 0), "the child leads a session and a process group of its own"),
    "preexec_fn": ((None,), "the keeper starts the child, and cannot run code of this process"),
    "startupinfo": ((None,), _WINDOWS),
    "creationflags": ((0,), _WINDOWS),
    "shell": ((False, True), "the function decides it"),
    "bufsize": ((0,), "the pipes are not buffered, as in asyncio"),
    "universal_newlines": ((False, None), _BYTES),
    "text": ((False, None), _BYTES),
    "encoding": ((None,), _BYTES),
    "errors": ((None,), _BYTES),
}


def check_keywords(keywords: PopenKeywords, *, shell: bool) -> None:
    """Raise `TypeError` for an unknown keyword, and `ValueError` for a value without support."""
    for name, value in keywords.items():
        if name not in PopenKeywords.__annotations__:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        values, reason = _FIXED.get(name, ((value,), ""))
        if value not in values or (name == "shell" and value is not shell):
            raise ValueError(f"{name} cannot be {value!r:.60}: {reason}")


def launch_of(words: Sequence[Path], keywords: PopenKeywords) -> Launch:
    """Check a call and return the order for it."""
    get = keywords.get
    cwd = get("cwd")
    if cwd is not None and not stat.S_ISDIR(os.stat(cwd).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), cwd)
    env = get("env")
    executable = get("executable")
    launch = prepare(
        [os.fsdecode(word) for word in (executable or words[0], *words[1:])],
        cwd=None if cwd is None else os.fsdecode(cwd),
        env=None if env is None else _decoded(env),
        inherit_env=env is None,
        pass_fds=_passed_fds(get("pass_fds", ()), closes=get("close_fds", True)),
    )
    umask = get("umask", -1)
    inherited = launch.inherited if umask < 0 else replace(launch.inherited, umask=umask)
    return replace(
        launch,
        argv=(os.fsencode(words[0]), *launch.argv[1:]),
        inherited=inherited,
        user=_identity(get("user"), get("group"), get("extra_groups"), launch.cwd),
    )


def _decoded(env: Mapping[Any, Any]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}


def _passed_fds(wanted: Iterable[int], *, closes: bool) -> list[int]:
    """Return the fds for the child besides the standard streams.

    Without `close_fds` these are all inheritable fds. Python makes an fd inheritable only on
    request.
    """
    fds = set(wanted)
    if not closes:
        fds.update(filter(is_inheritable, map(int, os.listdir("/dev/fd"))))
    return sorted(fd for fd in fds if fd > 2)


def is_inheritable(fd: int) -> bool:
    """Whether a child of this process would inherit the fd. False if the fd is closed."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _identity(
    user: str | int | None,
    group: str | int | None,
    extra_groups: Iterable[str | int] | None,
    folder: bytes,
) -> Become | None:
    """Return the user and the groups of the child; None if they are those of this process."""
    ours = os.geteuid(), os.getegid(), tuple(os.getgroups())
    theirs = (
        ours[0] if user is None else _number(user, lambda name: pwd.getpwnam(name).pw_uid),
        ours[1] if group is None else _group(group),
        ours[2] if extra_groups is None else tuple(map(_group, extra_groups)),
    )
    return None if theirs == ours else (*theirs, os.path.abspath(folder))


def _group(group: str | int) -> int:
    return _number(group, lambda name: grp.getgrnam(name).gr_gid)


def _number(wanted: str | int, find: Callable[[str], int]) -> int:
    number = find(wanted) if isinstance(wanted, str) else wanted
    if number < 0:
        raise ValueError(f"a user or a group cannot be {number}")
    return number


@contextlib.contextmanager
def os_errors(program: Path) -> Generator[None]:
    """Raise a failure of a start as `OSError`, and a wrong type as `TypeError`."""
    try:
        yield
    except UsageError as error:
        if isinstance(error.__cause__, TypeError):
            raise TypeError(str(error)) from error
        number = _errno(error)
        if number is None:
            raise
        is_program = isinstance(error, ProgramNotFound | ProgramNotExecutable)
        translated = OSError(number, os.strerror(number), *((program,) if is_program else ()))
        translated.add_note(str(error))
        raise translated from error


def _errno(error: UsageError) -> int | None:
    if isinstance(error.__cause__, OSError):
        return error.__cause__.errno
    if isinstance(error, ProgramNotFound):
        return errno.ENOENT
    return errno.EACCES if isinstance(error, ProgramNotExecutable) else None
