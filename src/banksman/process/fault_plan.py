"""Fault injection for tests: make the n-th system call of one role fail, or record every call.

Host, zygote and keeper make their system calls through `syscalls.py`, and a plan wraps the names of
that module. It is here and not in `banksman.testing`, because the zygote must follow it too, and
should load nothing else for it. Without a plan this module is never imported.
"""

from __future__ import annotations

import os

from banksman.process import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CALLS = (
    *("pipe", "socketpair", "open_fd", "memfd_create", "dup", "read", "write", "close_fd"),
    *(
        "set_blocking",
        "listdir",
        "fork",
        "posix_spawn",
        "execve",
        "setsid",
        "umask",
        "fchdir",
        "waitpid",
        "waitid",
    ),
    *(
        "kill",
        "killpg",
        "pidfd_open",
        "pidfd_send_signal",
        "prctl",
        "poll",
        "send",
        "recv",
        "send_fds",
        "recv_fds",
    ),
    *("open_pty", "ioctl", "chown", "become_user", "accept", "unlink"),
    *("mkdir", "rmdir", "statvfs", "getxattr"),
    *("splice", "pread", "pwrite", "ftruncate", "position", "seek"),
)

_plain: dict[str, Callable[..., Any]] = {name: getattr(syscalls, name) for name in CALLS}


class FaultPlan:
    """A plan of a test: one call of one role fails, or every call is recorded.

    Its text form is passed on the zygote's command line, and by fork to its keepers:
    `role:call:nth:errno:record`. An empty `role` injects nothing. An empty `record` (a file to
    append to) records nothing.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.role, self.call, nth, number, self.record = text.split(":", 4)
        self.nth = int(nth or 0)
        self.errno = int(number or 0)
        self.seen = 0

    def follow(self, role: str) -> None:
        """Wrap every call of this process, as `role`: host, zygote or keeper.

        Restarts the count.
        """
        self.seen = 0
        for name, plain in _plain.items():
            setattr(syscalls, name, self._planned(role, name, plain))

    def _planned(self, role: str, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        is_target = role == self.role and name == self.call

        def planned(*arguments: Any, **options: Any) -> Any:
            if self.record:
                _append(self.record, f"{role} {name}\n")
            if not is_target:
                return plain(*arguments, **options)
            self.seen += 1
            if self.seen != self.nth:
                return plain(*arguments, **options)
            if name == "close_fd":
                # The kernel frees the fd even if close() fails. A fault that left it open could not
                # happen in reality.
                plain(*arguments)
            raise OSError(self.errno, os.strerror(self.errno))

        return planned


def follow_no_plan() -> None:
    """Restore the plain calls."""
    for name, plain in _plain.items():
        setattr(syscalls, name, plain)


def _append(path: str, line: str) -> None:
    # Opened for each line: an fd that stays open would interfere with the calls under test.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
