"""The agent's process as a driver sees it: whole frames in, bytes out, and an end.

It is a command like any other, on the one stop ladder, with its first rung: the end of its stdin. `AgentProcess` is the
seam at which tests put a process of their own: whatever passes the same conformance tests may stand here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from msgspec import Struct

from banksman.commands import output
from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Ended
from banksman.core.process_facts import (
    BytesRead,
    Exited,
    KeeperActed,
    ProcessFact,
    Rung,
    Started,
    Stream,
    StreamEnded,
    Survivor,
    Swept,
)
from banksman.core.session.effects import StartProcess
from banksman.core.stop_ladder import Timings
from banksman.core.wire.redaction import Redactor
from banksman.errors import AgentError, BanksmanError
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.orphans import trace
from banksman.process.pipes import PipeWrite
from banksman.process.tree_cleanup import Pruned

# An agent's stderr is not its answer: its two ends are kept, to say why it failed.
STDERR_BYTES_MAX = 64 << 10


class Failed(Struct, frozen=True):
    """Nothing runs, and nothing will."""

    error: BanksmanError


class StdoutRead(Struct, frozen=True):
    """Bytes of its stdout."""

    data: bytes


class OutputEnded(Struct, frozen=True):
    """Nothing more will come from its stdout."""


class StdinWritten(Struct, frozen=True):
    """The pipe has taken the frame whole."""


class WriteBroke(Struct, frozen=True):
    """The frame was not taken, or only a part of it."""

    error: BanksmanError


class Stderr(Struct, frozen=True):
    """What an agent has written to stderr: all of it in `head`, or its two ends."""

    head: str = ""
    tail: str | None = None

    def text(self, redactor: Redactor | None) -> str:
        """As one text, without the secrets. Whoever cuts it must not do so before: a part of one is not recognised."""
        if self.tail is None:
            return self.head if redactor is None else redactor.redact_text(self.head)
        head, tail = (self.head, self.tail) if redactor is None else redactor.redact_ends(self.head, self.tail)
        return f"{head}\n[…]\n{tail}"


_NO_STDERR = Stderr()


class Gone(Struct, frozen=True):
    """Nothing of its tree is left but the survivors, and everything it wrote was told. `ladder`: what it took."""

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    drained: bool = True
    stderr: Stderr = _NO_STDERR
    ladder: tuple[Rung, ...] = ()


class ToolsSwept(Struct, frozen=True):
    """What was started since a moment is gone, but for the survivors; or it was only looked for, and they are all."""

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()


class LeaseRanOut(Struct, frozen=True):
    """Its keeper ends it: nobody has said in time that the session is still ours."""

    error: BanksmanError


AgentEvent = (
    Started | Failed | StdoutRead | OutputEnded | StdinWritten | WriteBroke | Exited | ToolsSwept | LeaseRanOut | Gone
)
OnEvent = Callable[[AgentEvent], None]


class AgentProcess(Protocol):
    """Told by `OnEvent`: `Started` or `Failed` first; then the others as they come; `Gone` last, and once.

    One frame at a time: a write is answered before the next is given. After `stop` nothing is written.
    """

    def write(self, data: bytes) -> None: ...
    def stop(self, kill_by: float | None = None) -> None:
        """By the ladder. `kill_by` (`time.monotonic()`): its waits are cut so that KILL has come by then; also those of
        a stop that is under way, which are only ever shortened."""
        ...

    def sweep_tools(self, since: float, ends: bool) -> None:
        """End what it has started since then (`loop.time()`), and all below that; the agent itself goes on, and so does
        what it had started before. `ends` False: nobody is ended, who is there is told as survivors.

        Only after `Started`. Answered by one `ToolsSwept` within a few seconds, unless `Gone` comes before. An exit or
        a stop in the middle of it takes over, and `Gone` says the rest.
        """
        ...

    def pause(self) -> None:
        """Stop reading, so that the pipe pushes back on the agent."""
        ...

    def resume(self) -> None: ...
    def look_now(self) -> None:
        """Tell what has happened already."""
        ...

    def abandon(self) -> None:
        """The loop is closed: nothing more is told."""
        ...


Spawn = Callable[[StartProcess, OnEvent], AgentProcess]


class RealAgent:
    """An `AgentProcess` that is one."""

    def __init__(self, launch: Launch, timings: Timings, on_event: OnEvent, lease: LeasePage | None = None) -> None:
        self._on_event = on_event
        options = Options(
            stdin="pipe",
            grace=timings.grace,
            linger=timings.linger,
            drain=timings.drain,
            eof=timings.eof,
            keeps_stdout=False,
            output_bytes_max=STDERR_BYTES_MAX,
            spill_bytes_max=0,
        )
        self._command = Command(
            launch, options, id=os.urandom(6).hex(), on_end=self._on_end, on_fact=self._on_fact, lease=lease
        )
        self._command.widen_stdout()

    def __repr__(self) -> str:
        return f"<RealAgent {self._command}>"

    def write(self, data: bytes) -> None:
        self._command.note_time()
        writing = self._command.put_nowait(data)
        if writing.done.done():
            self._on_done(writing)
        else:
            writing.done.add_done_callback(lambda _: self._on_done(writing))

    def _on_done(self, writing: PipeWrite) -> None:
        error = writing.done.exception()
        if error is None:
            self._on_event(StdinWritten())
        elif not self._command.is_over:
            assert isinstance(error, BanksmanError)
            self._on_event(WriteBroke(AgentError("the agent does not take its stdin any more", hint=str(error))))

    def stop(self, kill_by: float | None = None) -> None:
        self._command.stop_nowait(Ended.STOPPED, kill_by=kill_by)

    def sweep_tools(self, since: float, ends: bool) -> None:
        self._command.prune_nowait(since, ends=ends, on_pruned=self._on_pruned)

    def _on_pruned(self, pruned: Pruned) -> None:
        self._on_event(ToolsSwept(pruned.swept, pruned.survivors))

    def pause(self) -> None:
        self._command.pause_reading()

    def resume(self) -> None:
        self._command.resume_reading()

    def look_now(self) -> None:
        self._command.look_now()

    def abandon(self) -> None:
        self._command.abandon()

    def _on_fact(self, fact: ProcessFact) -> None:
        match fact:
            case BytesRead(stream=Stream.STDOUT, data=data):
                self._on_event(StdoutRead(data))
            case StreamEnded(stream=Stream.STDOUT):
                self._on_event(OutputEnded())
            case Started():
                self._on_event(replace(fact, born=trace(fact.pid)))
            case Exited():
                self._on_event(fact)
            case KeeperActed(by_lease=True):
                hint = "the host was stopped, or too busy to renew it"
                self._on_event(LeaseRanOut(AgentError("the host's lease ran out, and the agent was ended", hint=hint)))
            case _:
                pass

    def _on_end(self, command: Command) -> None:
        try:
            done = command.result()
        except BanksmanError as exc:
            self._on_event(Failed(exc))
            return
        began = time.time() - done.seconds
        ladder = tuple(Rung(step.rung, began + step.at) for step in done.ladder)
        self._on_event(Gone(done.swept, done.survivors, done.drained, _stderr_of(done.stderr), ladder))


def _stderr_of(written: output.Output) -> Stderr:
    if not written.dropped:
        return Stderr(written.text)
    return Stderr(written.head.decode(errors="replace"), written.tail.decode(errors="replace"))
