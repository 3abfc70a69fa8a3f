"""GuardOutcome of a guarded command: what ended it, its exit code, and the JSON of `--report`."""

from __future__ import annotations

import errno
import os
import stat

from banksman.errors import UsageError
from banksman.guard.signals import TERM
from banksman.process import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}

# Without O_NONBLOCK the open of a FIFO waits for a reader.
_DIRECTLY = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK

TIMED_OUT, OWN_FAILURE, SIGNALLED = 124, 125, 128


class GuardOutcome:
    """How the command and its tree ended.

    `ended`: exited, stopped (a signal to the guard), timeout, stdin_hangup, parent_died, memory,
    pids or keeper_lost. `code` and `signal`: of the command; both None if its status was lost.
    `caught`: the signal that the guard got before the end of the command; None if it got none.
    """

    def __init__(self) -> None:
        self.ended = "exited"
        self.code: int | None = None
        self.signal: int | None = None
        self.caught: int | None = None
        self.seconds = 0.0
        self.swept: list[tuple[int, str]] = []
        self.survivors: list[tuple[int, str, str]] = []
        self.ladder: list[tuple[str, float]] = []

    @property
    def fatal_signal(self) -> int | None:
        """The signal that the guard itself dies of, or None.

        The command died because of a signal that the guard got too. The parent of the guard must
        see that: a shell script ends on Ctrl-C only if its child died of SIGINT.
        """
        is_passed_on = self.signal == self.caught or self.ended == "stopped"
        return self.caught if self.signal is not None and is_passed_on else None

    @property
    def exit_code(self) -> int:
        if self.ended == "timeout":
            return TIMED_OUT
        if self.ended in ("memory", "pids"):
            # As `exec`: a command that handles TERM and exits with 0 has not succeeded.
            return SIGNALLED + TERM
        if self.signal is not None:
            return SIGNALLED + self.signal
        return OWN_FAILURE if self.code is None else self.code

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--report`, with the names that `exec --json` has too."""
        return {
            "ended": self.ended,
            "code": self.code,
            "signal": self.signal,
            "caught": self.caught,
            "seconds": round(self.seconds, 6),
            "swept": [{"pid": pid, "command": command} for pid, command in self.swept],
            "survivors": [
                {"pid": pid, "command": command, "why": why} for pid, command, why in self.survivors
            ],
            "ladder": [{"rung": rung, "at": round(at, 6)} for rung, at in self.ladder],
        }


class ReportFile:
    """Target of the report, checked before the command starts.

    A regular file appears whole or not at all: the report is written beside it and renamed. An open
    fd (`/dev/fd/3`) and any other file (a FIFO) are written directly. A FIFO is opened at the end,
    and only if it has a reader then: the start must not wait for one.
    """

    def __init__(self, path: str) -> None:
        # Absolute without a look at the links: `/dev/fd/3` must stay what it is.
        self._path = os.path.join(os.getcwd(), path)
        self._fd = -1
        self._is_replaced = True
        try:
            if (fd := _fd_of(path)) is not None:
                # A copy. Opening the path would begin at the start of a file again.
                self._fd = syscalls.dup(fd)
            elif os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
                self._is_replaced = False
            elif os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
                self._fd = syscalls.open_fd(path, _DIRECTLY)
            elif not os.access(os.path.dirname(self._path), os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "its folder is missing or not writable")
        except OSError as exc:
            hint = "pass a path in a folder that you may write to"
            message = f"cannot write the report to {path}: {exc.strerror}"
            raise UsageError(message, hint=hint) from exc

    @property
    def fds(self) -> list[int]:
        return [self._fd] if self._fd >= 0 else []

    def write(self, outcome: GuardOutcome) -> None:
        """Write the report; raises OSError."""
        import json  # noqa: PLC0415  Slow to import, and the command is over now.

        data = json.dumps(outcome.as_json()).encode() + b"\n"
        if self._fd >= 0:
            _write_all(self._fd, data)
            return
        if not self._is_replaced:
            _write_all(syscalls.open_fd(self._path, _DIRECTLY), data)
            return
        beside = f"{self._path}.{os.getpid()}.tmp"
        fd = syscalls.open_fd(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                _write_all(fd, data)
            finally:
                syscalls.close(fd)
            os.rename(beside, self._path)
        except OSError:
            os.unlink(beside)
            raise


def _fd_of(path: str) -> int | None:
    """Return the fd that a path such as /dev/fd/3 or /dev/stderr stands for, or None."""
    if path in _STREAMS:
        return _STREAMS[path]
    folder, _, name = path.rpartition("/")
    return int(name) if folder in ("/dev/fd", "/proc/self/fd") and name.isdigit() else None


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[syscalls.write(fd, data) :]
