"""Facts about a child process, and the values in them: frozen, named in the past tense.

A `ChildProcess` reports facts to its command, the command to the `AgentProcess` of a session, and
the `AgentProcess` to the session's driver. `ProcessFact` lists the facts of the first step,
`Report` those of the last. `sessions/agent_process.py` adds `born`, `FrameWritten`, `WriteFailed`
and `ProcessGone`. The driver redacts stderr, and wraps each fact in `ProcessReported`, which adds
the number of the process and the time of arrival. Times (`at`) are seconds of the machine's
monotonic clock, except in `Rung`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from banksman.errors import BanksmanError

# Identity of a process: boot id, then pid and start of the process, of its keeper, of its host, and
# of its keeper's zygote. See `process/orphans.py`.
Born = tuple[str, int, int, int, int, int, int, int, int]


class Stream(enum.StrEnum):
    """Output stream of a process."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Swept:
    """A process besides the leader that had to be ended."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that could not be ended, and the reason.

    `pid` 0: a process exists, but the kernel does not show it to this process.
    """

    pid: int
    command: str
    why: str


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the stop ladder that was taken.

    `at`: wall-clock time. It is only displayed, never compared.
    """

    rung: str
    at: float


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs.

    `born`: identifies the process, so that another host can find it later.
    """

    pid: int
    at: float
    born: Born | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The start failed: no process runs, and none will."""

    error: BanksmanError


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """The command was stopped before its process began: nothing ran."""

    at: float


class BytesRead(NamedTuple):
    """A piece of the process's output, exactly as read.

    A named tuple, because each token is one: it is made twice as fast as a frozen dataclass.
    """

    stream: Stream
    data: bytes
    at: float


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has ended; no further bytes will be read.

    `is_whole` False: reading failed, so the stream may have held more.
    """

    stream: Stream
    at: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Exited:
    """The leader has ended.

    `code` and `signal` both None: its exit status was lost, because its keeper was killed.

    `by_itself`: the keeper had not signalled the leader before, so a stop requested meanwhile did
    not end it.

    `is_out_of_memory`: the kernel killed it because memory ran out, mostly at its limit.
    """

    code: int | None
    signal: int | None
    at: float
    by_itself: bool = False
    is_out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class KeeperActed:
    """The keeper took a rung without a command from the host.

    The host was silent past the keeper's deadline, or it closed the connection. `by_lease`: the
    host did not renew the lease on the keeper's work in time. The rung `cgroup` is a part of KILL:
    the keeper has killed the control group of the tree.
    """

    rung: str
    at: float
    by_lease: bool = False


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """The pipe has accepted a whole frame."""


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The process accepts no further input. How much of the frame it received is unknown."""

    error: BanksmanError


@dataclass(frozen=True, slots=True)
class ProcessesSwept:
    """Processes besides the leader that were ended.

    They ended with the tree, or by a sweep whose caller has stopped waiting.
    """

    processes: tuple[Swept, ...]


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """A sweep is over: the processes started since a given moment are gone, except the survivors.

    A sweep that only looks ends nothing. `survivors` then lists every process found.
    """

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeEnded:
    """No process of the tree is left except the survivors.

    Output of the tree may still be unread; see `ProcessGone`.
    """

    survivors: tuple[Survivor, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Stderr:
    """Stderr of a process: all of it in `head`, or its beginning there and its end in `tail`."""

    head: str = ""
    tail: str | None = None

    @property
    def text(self) -> str:
        """The kept stderr as one text, with a mark where its middle is missing."""
        return self.head if self.tail is None else f"{self.head}\n[…]\n{self.tail}"


_NO_STDERR = Stderr()


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """The tree has ended and all of its output has been reported.

    `ladder`: the rungs that were taken with this process.
    """

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    drained: bool = True
    stderr: Stderr = _NO_STDERR
    ladder: tuple[Rung, ...] = ()


# Facts that a `ChildProcess` reports to its command.
ProcessFact = (
    Started
    | StartFailed
    | NeverStarted
    | BytesRead
    | StreamEnded
    | Exited
    | KeeperActed
    | ProcessesSwept
    | SweepEnded
    | TreeEnded
)
# Facts that a session takes from its process. Output reaches the session as frames instead.
Report = Started | StartFailed | FrameWritten | WriteFailed | Exited | SweepEnded | ProcessGone
