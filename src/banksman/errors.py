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

import enum
import errno
import os

# `typing` costs milliseconds, and `guard` starts with this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


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


class HookFailed(CommandError):
    """The `on_open` hook of a session failed, so the session was not opened."""


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


class ErrorKind(enum.StrEnum):
    """Cause of an agent's failure, decided by the fields of its frames."""

    # The provider throttles requests for a short time.
    RATE_LIMITED = "rate_limited"
    # A usage window of the account is used up, until `limited_until`.
    USAGE_LIMIT = "usage_limit"
    # The provider is overloaded or reports an internal error.
    OVERLOADED = "overloaded"
    # The key or the login is missing, invalid or not allowed.
    AUTH = "auth"
    # The account must pay.
    BILLING = "billing"
    # The provider refuses the request itself, or does not know the model.
    INVALID_REQUEST = "invalid_request"
    # The conversation or the prompt is too long for the model.
    CONTEXT_OVERFLOW = "context_overflow"
    # The agent reached its limit of model calls in one turn.
    MAX_TURNS = "max_turns"
    # The agent reached its own limit of cost.
    BUDGET = "budget"
    # The provider could not be reached, or the connection was lost.
    NETWORK = "network"
    # The kernel killed the agent's process because memory ran out, mostly at the limit of its tree.
    OUT_OF_MEMORY = "out_of_memory"
    # The agent's process ended, could not be started, or had to be replaced.
    AGENT_EXITED = "agent_exited"
    # The agent broke its protocol: a frame was too large, or a result is missing.
    PROTOCOL = "protocol"
    OTHER = "other"


# What to do about each kind. The text of an error does not contain these hints.
HINTS: Mapping[ErrorKind, str] = {
    ErrorKind.RATE_LIMITED: "ask again after `retry_after` seconds, or a minute if it is None",
    ErrorKind.USAGE_LIMIT: "wait until `limited_until`, or use another account or agent",
    ErrorKind.OVERLOADED: "ask again later",
    ErrorKind.AUTH: "log the agent in, or give it a valid key",
    ErrorKind.BILLING: "check the payment or the credit of the account",
    ErrorKind.INVALID_REQUEST: "change the prompt, the model or the agent's settings",
    ErrorKind.CONTEXT_OVERFLOW: "send a shorter prompt; the session begins a new conversation",
    ErrorKind.MAX_TURNS: "raise the agent's limit of turns, or ask for a smaller step",
    ErrorKind.BUDGET: "raise the agent's budget",
    ErrorKind.NETWORK: "check the connection to the provider and ask again",
    ErrorKind.OUT_OF_MEMORY: "raise the limit `memory_bytes` of the agent, or ask for less",
    ErrorKind.AGENT_EXITED: "see the stderr of the agent; `banksman doctor` checks its program",
    ErrorKind.PROTOCOL: "update the agent, or report this with the session's log",
    ErrorKind.OTHER: "",
}


class AgentError(BanksmanError):
    """The agent failed: it could not be started, it died, or it reported a failure.

    `kind`: the cause. `status`: the HTTP status of the provider. `retry_after`: seconds to wait, as
    the provider said. `limited_until`: when the account's limit ends, in wall clock seconds, UTC.
    `message`: the text without the hint. `raw`: the fields of the frame that decided the kind.
    Each is None if the agent did not report it. Programs decide by these, never by the text.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        kind: ErrorKind = ErrorKind.OTHER,
        status: int | None = None,
        retry_after: float | None = None,
        limited_until: float | None = None,
        raw: Mapping[str, Any] | None = None,
        **ids: object,
    ) -> None:
        super().__init__(message, hint=hint or HINTS[kind], **ids)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after
        self.limited_until = limited_until
        self.raw = raw

    @property
    def message(self) -> str:
        """The text of the error without its hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        # The text is the agent's. A general hint of the kind is no part of it.
        return self.message if self.hint == HINTS[self.kind] else super().__str__()


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
