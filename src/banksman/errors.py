"""The errors, by who must act.

`UsageError`: you, the caller. `CommandError`: the command that was run; `AgentError`: the agent. `Refused`: Banksman,
on purpose. `StoreError`: whoever keeps the log. `MachineError`: whoever runs the machine (no fds, no memory, no room
for another process). Each carries a `hint` that says what to do. An expected ending (a non-zero code, a timeout, a turn
that was interrupted) is a value and never one of these.
"""

from __future__ import annotations

import errno
import os


class BanksmanError(Exception):
    """Base of all. `hint` says what to do; `ids` say which thing it was about."""

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
    """There is no such session, turn, question or command; or it is too old to be kept."""


class ProgramNotFound(UsageError):
    """There is no such program, on PATH or at the path given."""


class ProgramNotExecutable(UsageError):
    """There is such a file, but it cannot be run."""


class CommandError(BanksmanError):
    """The command did something that makes this call impossible: it closed its stdin, it has ended."""


class Refused(BanksmanError):
    """Banksman declined, on purpose: the host is closing, a write's deadline has passed."""


class QueueFull(Refused):
    """So many asks are waiting in this session already."""


class Busy(Refused):
    """The session is at work, and the ask said `on_busy="reject"`."""


class NotOwner(Refused):
    """Another writer has the session: a newer claim, or another host."""


class NoOwner(Refused):
    """Nobody answers for the session: its host is gone, or cannot be heard."""


class NameTaken(Refused):
    """Another session of the store has this name."""


class Closed(Refused):
    """The session or its host is closed, or is being closed."""


class Moving(Refused):
    """The session is leaving this host, or has left it, and nothing was accepted: ask again, whoever has it next takes
    it."""


class Moved(Refused):
    """The session has left this host, and the ask waits in its log for whoever has it next. It is not to be asked
    again: its outcome will be in the log."""


class AgentError(BanksmanError):
    """The agent failed: it could not be started, it died, it said so."""


class StoreError(BanksmanError):
    """The log could not be written, or not be read: the disk, or the cluster."""


class Unreachable(StoreError):
    """The cluster, or the host that has the session, does not answer. It is not gone: what it accepted is kept."""


class Unanswered(Unreachable):
    """It was sent, and no answer came: whether it was done is unknown, until somebody looks."""


class StoreFull(StoreError):
    """The disk is full, or the quota. What was not acknowledged is not there; it can be tried again."""


class StoreReadOnly(StoreError):
    """The file, its folder or its file system may not be written."""


class StoreBusy(StoreError):
    """Another process has held the file for longer than we wait."""


class StoreDamaged(StoreError):
    """What is in the file is not what was written there: a torn tail, a bad page, a foreign file."""


class HistoryLost(StoreError):
    """The cursor is of a history that the store does not have any more: a power cut took its end, or an older copy was
    put in its place, and nothing else stands there yet. What was read after it is not there."""


class StoreTooNew(StoreError):
    """A newer Banksman has written the file."""


class BugError(BanksmanError):
    """A bug of Banksman's own. It failed one session, and is in the log with the facts that led to it."""


class MachineError(BanksmanError, OSError):
    """The machine had no room: fds, memory, processes. `errno` is set where there is one."""

    def __init__(self, message: str, *, number: int | None = None, hint: str = "", **ids: object) -> None:
        super().__init__(message, hint=hint, **ids)
        self.errno = number


def no_room(step: str, exc: OSError, **ids: object) -> MachineError:
    """An OSError of ours as what it is: the machine has no room."""
    number = exc.errno or 0
    hint = {
        errno.EMFILE: "this process has too many open files: close some, or raise its limit (ulimit -n)",
        errno.ENFILE: "the machine has too many open files: see /proc/sys/fs/file-max",
        errno.EAGAIN: "too many processes for this user or control group: see ulimit -u and pids.max",
        errno.ENOMEM: "not enough memory",
    }.get(number, "")
    return MachineError(f"cannot start a command: {step}: {os.strerror(number)}", number=number, hint=hint, **ids)
