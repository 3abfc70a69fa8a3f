"""Error classes, grouped by the party that must act.

- `UsageError`: the caller.
- `CommandError`: the command that was run.
- `AgentError`: the agent.
- `Refused`: Banksman, on purpose.
- `StoreError`: the operator of the log.
- `MachineError`: the operator of the machine (no fds, no memory, no room for another process).
- `BugError`: the developers of Banksman.

An error has a `hint` that says what to do, if there is something to do. An expected end (a non-zero
code, a timeout, an interrupted turn) is a value and never an error. `no_room` converts an OSError
of a start.
"""

from __future__ import annotations

import errno
import os


class BanksmanError(Exception):
    """Base of all errors. `hint`: what to do. `ids`: the objects that the error is about."""

    def __init__(self, message: str, *, hint: str = "", **ids: object) -> None:
        super().__init__(message)
        self.hint = hint
        self.ids = ids

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(BanksmanError, ValueError):
    """The caller must change the call. Nothing was started."""


class NotFound(UsageError):
    """There is no such session, turn, question or command, or it was too old to be kept."""


class ProgramNotFound(UsageError):
    """There is no such program, on PATH or at the given path."""


class ProgramNotExecutable(UsageError):
    """The file exists, but cannot be run."""


class CommandError(BanksmanError):
    """The command made this call impossible: it closed its stdin, or it has ended."""


class Refused(BanksmanError):
    """Banksman declined on purpose: the host is closing, or the deadline of a write has passed."""


class QueueFull(Refused):
    """The queue of this session has its maximum number of asks."""


class Busy(Refused):
    """The session is busy, and the ask has `on_busy="reject"`."""


class NotOwner(Refused):
    """Another writer owns the session: a newer claim, or another host."""


class NoOwner(Refused):
    """No host answers for the session: its host is gone or unreachable."""


class NameTaken(Refused):
    """Another session of the store has this name."""


class Closed(Refused):
    """The session or its host is closed or closing."""


class Moving(Refused):
    """The session is leaving or has left this host, and the ask was not accepted.

    Ask again: the next owner accepts it.
    """


class Moved(Refused):
    """The session has left this host, and the ask waits in its log for the next owner.

    Do not ask again: the outcome will be in the log.
    """


class AgentError(BanksmanError):
    """The agent failed: it could not be started, it died, or it reported a failure."""


class StoreError(BanksmanError):
    """The log could not be written or read: the disk, or the cluster."""


class Unreachable(StoreError):
    """The cluster, or the owner of the session, does not answer.

    Requests that it has accepted are kept.
    """


class Unanswered(Unreachable):
    """A request was sent and no answer came.

    Whether it was carried out is unknown until the caller checks.
    """


class StoreFull(StoreError):
    """The disk or the quota is full. Unacknowledged events are not stored; retry them."""


class StoreReadOnly(StoreError):
    """The file, its folder or its file system is read-only."""


class StoreBusy(StoreError):
    """Another process has locked the file for longer than the timeout."""


class StoreDamaged(StoreError):
    """The file does not contain what was written: a torn tail, a bad page, a foreign file."""


class HistoryLost(StoreError):
    """The cursor belongs to a history that the store has lost. Events read after it do not exist.

    A power cut removed the end of the log, or an older copy replaced it, and no new events stand
    there yet.
    """


class StoreTooNew(StoreError):
    """A newer version of Banksman has written the file."""


class BugError(BanksmanError):
    """A bug in Banksman. It failed one session, and the log has the facts that led to it."""


class MachineError(BanksmanError, OSError):
    """The machine has no room: fds, memory, processes. `errno` is set where there is one."""

    def __init__(
        self, message: str, *, number: int | None = None, hint: str = "", **ids: object
    ) -> None:
        super().__init__(message, hint=hint, **ids)
        self.errno = number


def no_room(step: str, exc: OSError, **ids: object) -> MachineError:
    """Convert an OSError of a start into a MachineError with a hint."""
    number = exc.errno or 0
    hint = {
        errno.EMFILE: (
            "this process has too many open files: close some, or raise its limit (ulimit -n)"
        ),
        errno.ENFILE: "the machine has too many open files: see /proc/sys/fs/file-max",
        errno.EAGAIN: (
            "too many processes for this user or control group: see ulimit -u and pids.max"
        ),
        errno.ENOMEM: "not enough memory",
    }.get(number, "")
    return MachineError(
        f"cannot start a command: {step}: {os.strerror(number)}", number=number, hint=hint, **ids
    )
