"""Interface of the driver to an agent's process, `RealAgent`, and `DrivenProcess`.

The driver writes frames, and gets output as bytes, reports of changes, and one end. `DrivenProcess`
passes the bytes to `frame_reader.py`, pauses the reading, keeps the reports behind the output, and
detects an agent that has closed its stdout and does not exit.

`RealAgent` runs a real process. It wraps a `Command` like any other, and uses the same stop ladder,
with the end of stdin as the first rung. Tests replace the interface `AgentProcess` with a fake.
Every implementation must pass the same conformance tests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from banksman.commands import output
from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Ended
from banksman.core.process_facts import (
    BytesRead,
    Exited,
    FrameWritten,
    KeeperActed,
    ProcessFact,
    ProcessGone,
    Report,
    Rung,
    Started,
    StartFailed,
    Stderr,
    Stream,
    StreamEnded,
    SweepEnded,
    WriteFailed,
)
from banksman.core.redaction.redactor import Redactor
from banksman.core.session.effects import StartProcess
from banksman.core.stop_ladder import Timings
from banksman.errors import AgentError, BanksmanError
from banksman.process.adoption import Claimed
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.orphans import trace
from banksman.process.pipes import PipeWrite
from banksman.process.tree_hand_over import Survival
from banksman.sessions.frame_reader import FrameReader

# An agent's stderr is not its answer. The beginning and the end are kept to explain a failure.
STDERR_BYTES_MAX = 64 << 10
# The end of stdout is nearly always the beginning of an agent's exit. An agent that still lives
# after this time can neither answer nor be interrupted.
MUTE_SECONDS_MAX = 1.0

# Reports of an `AgentProcess`: its stdout in pieces, and changes of the process.
AgentReport = BytesRead | StreamEnded | Report
OnReport = Callable[[AgentReport], None]


class AgentProcess(Protocol):
    """Process of an agent, with reports through `OnReport`.

    The first report is `Started` or `StartFailed`. `ProcessGone` is the last report and comes once.
    The driver writes one frame at a time: each write is confirmed before the next write. The driver
    writes nothing after `stop`.
    """

    def write(self, data: bytes) -> None: ...
    def stop(self, kill_by: float | None = None) -> None:
        """Stop the process by the ladder.

        `kill_by` (`time.monotonic()`): the ladder's waits are shortened so that KILL comes by then.
        This also applies to a stop that is already running. A call never lengthens a wait.
        """
        ...

    def sweep_tools(self, since: float, ends: bool) -> None:
        """End the processes that the agent has started since `since`, and their descendants.

        The agent keeps running, and so do the processes that it started before. `since`: a time of
        `loop.time()`. `ends`: False only lists the processes and reports them as survivors.

        Allowed only after `Started`. The answer is one `SweepEnded` within a few seconds, unless
        `ProcessGone` comes first. An exit or a stop in the middle replaces the sweep, and
        `ProcessGone` reports the rest.
        """
        ...

    def hand_over(self, hold_seconds: float, secret: bytes, record: bytes) -> asyncio.Future[str]:
        """Give the process to the next host, and return the name of its hold.

        From the call on nothing is read or reported. If the future raises, or if this call raises
        `Refused`, this host keeps the process. After the result it has no process.
        """
        ...

    def stderr(self) -> Stderr:
        """Return what the process has written to stderr so far."""
        ...

    def settle(self, offset: int | None = None) -> None:
        """Note that the stdout before this offset is durable; None: all that was reported.

        Only for a process that survives its host: the next host reads from there.
        """
        ...

    def forgo_survival(self) -> None:
        """Let the process end with this host, although it was started to survive it."""
        ...

    def release(self) -> None:
        """Release the guards of a process that survives its host: its end is durable."""
        ...

    def pause(self) -> None:
        """Stop reading, so that the full pipe blocks the agent (backpressure)."""
        ...

    def resume(self) -> None: ...
    def look_now(self) -> None:
        """Read and report everything that has already happened."""
        ...

    def abandon(self) -> None:
        """Stop reporting, because the event loop is closed."""
        ...


Spawn = Callable[[StartProcess, OnReport], AgentProcess]
# Continues a process that another host has started.
Continue = Callable[[OnReport], AgentProcess]


class DrivenProcess:
    """One process of a session, with its output and its reports in the order of their arrival.

    `frames`: the frame reader of the session. `on_report`: gets the number of the process, and
    every report but the output, without secrets.
    """

    def __init__(
        self,
        number: int,
        begin: Continue,
        frames: FrameReader,
        on_report: Callable[[int, Report], None],
        redactor: Redactor | None = None,
    ) -> None:
        """`number`: of the process. `begin`: starts the process, or takes it over."""
        self._loop = asyncio.get_running_loop()
        self._number = number
        self._frames = frames
        self._on_report = on_report
        self._redactor = redactor
        self.pid: int | None = None
        # When the stop began; None if the process is not being stopped.
        self.stopping_since: float | None = None
        self.is_paused = False
        self._is_held = False
        self._has_exited = False
        self._mute: asyncio.TimerHandle | None = None
        self.agent = begin(self._receive)

    def pause(self) -> None:
        """Stop reading the output."""
        if not self.is_paused:
            self.is_paused = True
            self.agent.pause()

    def resume(self) -> None:
        # Never while frames wait in the backlog: its end calls `on_caught_up`.
        if self.is_paused and not self._is_held and not self._frames.is_behind:
            self.is_paused = False
            self.agent.resume()

    def hold(self) -> None:
        """Stop reading until `release`, whatever the log and the frames say."""
        self.pause()
        self._is_held = True

    def release(self) -> None:
        """Read again, unless there is another reason not to."""
        self._is_held = False
        self.resume()

    def take_back(self, begin: Continue) -> None:
        """Continue the process that was handed over, because its next host will not come."""
        self.is_paused = False
        self.agent = begin(self._receive)

    def stderr(self) -> Stderr:
        """Return what the process has written to stderr so far, without secrets."""
        return _redacted(_without_begun(self.agent.stderr(), self._redactor), self._redactor)

    def stop(self, kill_by: float | None = None) -> None:
        """Stop the process, see `AgentProcess.stop`."""
        self.stopping_since = self.stopping_since or self._loop.time()
        self._is_held = False
        # A process that is blocked on a full pipe cannot react to a signal, so reading resumes.
        self.resume()
        self.agent.stop(kill_by)

    def _receive(self, report: AgentReport) -> None:
        if isinstance(report, BytesRead):
            self._frames.feed(self._number, report.data)
            return
        if isinstance(report, Exited):
            self._frames.note_exit()
        # An event of the process must not overtake output that still waits in the backlog.
        # `FrameWritten` is exempt: it only permits the next write and has no order relative to the
        # output.
        if self._frames.is_behind and not isinstance(report, FrameWritten):
            self._frames.after(partial(self._hear, report))
        else:
            self._hear(report)

    def _hear(self, report: StreamEnded | Report) -> None:
        match report:
            case StreamEnded():
                self._on_output_end()
                return
            case Started(pid=pid):
                self.pid = pid
            case Exited():
                self._has_exited = True
                self._cancel_mute()
            case StartFailed():
                self._cancel_mute()
            case ProcessGone(stderr=stderr):
                self._cancel_mute()
                report = replace(report, stderr=_redacted(stderr, self._redactor))
            case _:
                pass
        self._on_report(self._number, report)

    def _on_output_end(self) -> None:
        self._frames.end(self._number)
        # After the exit, only other processes of its tree hold stdout open. They do not count as
        # mute.
        if not self._has_exited:
            self._mute = self._loop.call_later(MUTE_SECONDS_MAX, self._on_mute)

    def _on_mute(self) -> None:
        # The exit may already have happened. In that case `look_now` reports it, and the report
        # cancels the timer.
        self.agent.look_now()
        if self._mute is not None:
            self._mute = None
            hint = "its process is stopped, because no more output can arrive"
            error = AgentError("the agent closed its stdout and did not exit", hint=hint)
            self._on_report(self._number, WriteFailed(error))

    def _cancel_mute(self) -> None:
        if self._mute is not None:
            self._mute.cancel()
            self._mute = None


class RealAgent:
    """`AgentProcess` backed by a real process."""

    def __init__(
        self,
        launch: Launch | Claimed,
        timings: Timings,
        on_report: OnReport,
        lease: LeasePage | None = None,
        survival: Survival | None = None,
    ) -> None:
        """Start the process, or continue a claimed one, whose start is not reported again.

        `survival`: the process survives the death of this host.
        """
        self._on_report = on_report
        self._is_claimed = isinstance(launch, Claimed)
        self._handed: asyncio.Future[str] | None = None
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
            launch,
            options,
            id=os.urandom(6).hex(),
            on_end=self._on_end,
            on_fact=self._on_fact,
            on_stdout=on_report,
            lease=lease,
            survival=survival,
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
            self._on_report(FrameWritten())
        elif not self._command.is_over:
            assert isinstance(error, BanksmanError)
            failed = AgentError("cannot write to the agent's stdin", hint=str(error))
            self._on_report(WriteFailed(failed))

    def stop(self, kill_by: float | None = None) -> None:
        self._command.stop_nowait(Ended.STOPPED, kill_by=kill_by)

    def sweep_tools(self, since: float, ends: bool) -> None:
        self._command.sweep_nowait(since, ends=ends)

    def hand_over(self, hold_seconds: float, secret: bytes, record: bytes) -> asyncio.Future[str]:
        self._handed = self._command.hand_over_nowait(hold_seconds, secret, record)
        return self._handed

    def stderr(self) -> Stderr:
        return _stderr_of(self._command.kept(Stream.STDERR))

    @property
    def _is_handed_over(self) -> bool:
        handed = self._handed
        return handed is not None and handed.done() and handed.exception() is None

    def settle(self, offset: int | None = None) -> None:
        self._command.settle_output(Stream.STDOUT, offset)

    def forgo_survival(self) -> None:
        self._command.forgo_survival()

    def release(self) -> None:
        if self._command.is_over:
            self._command.release()

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
            case BytesRead():
                # No log has stderr. A successor has no use for it.
                self._command.settle_output(fact.stream)
            case StreamEnded(stream=Stream.STDOUT) | Exited() | SweepEnded():
                self._on_report(fact)
            case Started() if not self._is_claimed:
                self._on_report(replace(fact, born=trace(fact.pid)))
            case KeeperActed(by_lease=True):
                hint = "check whether the host was suspended or overloaded"
                error = AgentError("the agent was stopped: the host's lease expired", hint=hint)
                self._on_report(WriteFailed(error))
            case _:
                pass

    def _on_end(self, command: Command) -> None:
        if self._is_handed_over:
            return  # The command is over for this host. The process is not.
        try:
            done = command.result()
        except BanksmanError as exc:
            self._on_report(StartFailed(exc))
            return
        began = time.time() - done.seconds
        ladder = tuple(Rung(step.rung, began + step.at) for step in done.ladder)
        self._on_report(
            ProcessGone(done.swept, done.survivors, done.drained, _stderr_of(done.stderr), ladder)
        )


def _stderr_of(written: output.Output) -> Stderr:
    if not written.dropped:
        return Stderr(written.text)
    return Stderr(written.head.decode(errors="replace"), written.tail.decode(errors="replace"))


def _redacted(stderr: Stderr, redactor: Redactor | None) -> Stderr:
    """Remove the secrets from stderr.

    Redact before truncating: a truncated part of a secret is not recognised.
    """
    if redactor is None:
        return stderr
    if stderr.tail is None:
        return Stderr(redactor.redact_text(stderr.head))
    return Stderr(*redactor.redact_ends(stderr.head, stderr.tail))


def _without_begun(stderr: Stderr, redactor: Redactor | None) -> Stderr:
    """Leave out the end if it may be the beginning of a secret, which the process still writes."""
    if redactor is None:
        return stderr
    # An unfinished character is replaced, and would hide that beginning.
    if stderr.tail is None:
        return Stderr(redactor.without_begun(stderr.head.rstrip("\ufffd")))
    return Stderr(stderr.head, redactor.without_begun(stderr.tail.rstrip("\ufffd")))
