"""A running command: the owner of its process, output, timers and stop ladder.

Its life reaches from the call to the proof that no process of its tree is left. Every fact, from
the keeper, the pipes, the timers or a caller, enters by `dispatch`, one at a time, and no handler
suspends. Therefore no task has to be cancelled and no lock is needed. A cancelled caller stops
waiting, and the teardown continues. command.py has the methods that wait. The process of an agent
is a command too (sessions/agent_process.py).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, assert_never

from banksman.commands.options import Options
from banksman.commands.output_streams import CommandOutput
from banksman.commands.output_watch import MatcherPool
from banksman.commands.result import Ended, Finished, ResultBuilder
from banksman.core import stop_ladder as rungs
from banksman.core.process_facts import (
    BytesRead,
    Exited,
    KeeperActed,
    NeverStarted,
    ProcessesSwept,
    ProcessFact,
    Started,
    StartFailed,
    Stream,
    StreamEnded,
    Survivor,
    SweepEnded,
    TreeEnded,
)
from banksman.dispatcher import Dispatcher
from banksman.errors import BanksmanError, CommandError, Refused
from banksman.process.adoption import AdoptedProcess, Claimed
from banksman.process.eof_reaction import EofReaction
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.pipes import PipeWrite, PipeWriter
from banksman.process.process import Process
from banksman.tasks import Waiters

if TYPE_CHECKING:
    from banksman.process.portable import PortableProcess

log = logging.getLogger("banksman")

# Without a subreaper a command has no keeper, and guarantee G6 (docs/guarantees.md) is best effort.
PROCESS: type[Process | PortableProcess]
if sys.platform == "linux":
    PROCESS = Process  # pyright: ignore[reportConstantRedefinition]
else:
    from banksman.process import portable

    PROCESS = portable.PortableProcess

# Extra time until the keeper stops a command after its timeout without an order. The host's timer
# fires first, unless the host is frozen.
KEEPER_TIMEOUT_MARGIN_SECONDS = 1.0
# Time between the end of stdin and the look for a reaction, and between two looks. A thread that
# waits for input is woken by the close itself. Later looks find that another reader has exited.
EOF_REACTION_SECONDS = 0.1


class State(enum.StrEnum):
    """State of a command, as callers see it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A caller requests the stop, with this cause."""

    cause: Ended
    stop: rungs.StopAsked


@dataclass(frozen=True, slots=True)
class ClockRanOut:
    """`timeout` or `idle_timeout` may have passed. The handler checks again before it acts."""

    cause: Ended


# Facts about the stop, which `on_fact` does not get.
StopFact = rungs.LadderTimerFired | rungs.InputEndIgnored | StopRequested | ClockRanOut
Fact = ProcessFact | StopFact


class Reports(Protocol):
    """Ends of commands that are still to be reported, each once."""

    def owe_report(self, command: Any) -> None: ...
    def take_report(self, command: Any) -> bool: ...


class RunningCommand:
    """Implementation of `Command`. All methods belong to the event loop of its start."""

    def __init__(
        self,
        launch: Launch | Claimed,
        options: Options,
        *,
        id: str,
        on_end: Callable[[Self], None],
        on_fact: Callable[[ProcessFact], None] | None = None,
        on_stdout: Callable[[BytesRead], None] | None = None,
        matchers: MatcherPool | None = None,
        reports: Reports | None = None,
        lease: LeasePage | None = None,
    ) -> None:
        """Start the process, or take over a claimed one.

        A process that was taken over keeps its start time, from which `timeout` counts. `options`
        are those of its start.

        `on_fact`: called with each process fact before it is handled, and never after the end.
        `on_stdout`: takes the output of stdout, which is then neither kept nor counted here.
        `matchers`: helpers for `watch`. `reports`: the registry that reports its end. `lease`:
        limits the life of the process even if no caller stops it.
        """
        self.id = id
        self.argv = tuple(word.decode("utf-8", "replace") for word in launch.argv)
        self.finished: Finished | None = None
        self._options = options
        self._on_end = on_end
        self._on_fact = on_fact
        self._on_stdout = on_stdout
        self._matchers = matchers
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        began = launch.started_at if isinstance(launch, Claimed) else now
        self._account = ResultBuilder(began, options)
        self._account.last_output = now
        self._dispatcher = Dispatcher(self._handle)
        self._flow = CommandOutput(options, self._account)
        self._ladder = rungs.Ladder(options.timings, is_output_closed=not self._flow.open)
        self._ladder_timer: asyncio.TimerHandle | None = None
        self._eof_timer: asyncio.TimerHandle | None = None
        self._bytes_after_eof = 0
        self._clocks: dict[Ended, asyncio.TimerHandle] = {}
        self._error: BanksmanError | None = None
        self._over_at = 0.0
        # Not woken by output: a flood must not wake the tasks that wait for the end once for each
        # piece.
        self._progress = Waiters()
        self._has_callback_failed = False
        timeout = options.timeout
        self._process: Process | PortableProcess | AdoptedProcess
        if isinstance(launch, Claimed):
            self._process = AdoptedProcess(launch, on_fact=self.dispatch)
        else:
            self._process = PROCESS(
                launch,
                stdin=options.source,
                grace=options.grace,
                linger=options.linger,
                deadline=None if timeout is None else timeout + KEEPER_TIMEOUT_MARGIN_SECONDS,
                on_fact=self.dispatch,
                terminal=options.terminal,
                lease=lease,
                outputs=options.outputs,
            )
            self._begin_input(self._process.stdin)
        self._flow.begin(self._process)
        self._set_clock(Ended.TIMEOUT, None if timeout is None else timeout - (now - began))
        self._set_clock(Ended.IDLE_TIMEOUT, options.idle_timeout)

    def _begin_input(self, stdin: PipeWriter | None) -> None:
        """Write the input that was given with the options, if any."""
        if isinstance(self._options.stdin, bytes):
            assert stdin is not None
            stdin.put(self._options.stdin)
            stdin.end()
        elif self._options.ends_input and stdin is not None:
            stdin.end()

    def __repr__(self) -> str:
        return f"<Command {self.id} {self.state} pid={self.pid} {' '.join(self.argv)!r}>"

    # -- state ------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def keeper_pid(self) -> int | None:
        """The process above the whole tree; None before the start, and on macOS."""
        return self._process.keeper_pid

    @property
    def state(self) -> State:
        if self.is_over:
            return State.ENDED
        if self._ladder.phase is not rungs.LadderPhase.RUNNING:
            return State.STOPPING
        return State.STARTING if self.pid is None else State.RUNNING

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self._error is not None

    def ended_before(self, at: float) -> bool:
        """Return whether the command was over before this time."""
        return self.is_over and self._over_at < at

    def result(self) -> Finished:
        """Return the result of a finished command, or raise its error."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self.finished is not None
        return self.finished

    def take_report(self) -> bool:
        """Mark the end as reported. False if it was already reported, or needs no report."""
        return self._reports is not None and self._reports.take_report(self)

    def return_report(self) -> None:
        """Undo `take_report`, because its caller is gone. The next caller gets the report."""
        if self._reports is not None:
            self._reports.owe_report(self)

    @property
    def keeps_output(self) -> bool:
        return self._options.keep_output

    def has_output(self, stream: Stream, after: int) -> bool:
        """Return whether there is output from byte `after` on, or the stream has ended."""
        return self.written(stream) > after or self._flow.has_ended(stream)

    def written(self, stream: Stream) -> int:
        """Return the number of bytes written to a stream."""
        return self._flow.captures[stream].total

    # -- operations that do not wait --------------------------------------------------------------
    def stop_nowait(
        self, cause: Ended = Ended.STOPPED, *, at_once: bool = False, kill_by: float | None = None
    ) -> None:
        """Begin to stop the command and return immediately.

        The ladder then runs without the caller. Callbacks such as `on_output` may call this. No
        effect after the end. Use `wait` for the end.

        `cause`: the value of `Finished.ended`. `at_once`: KILL without the earlier rungs. `kill_by`
        (`time.monotonic()`): shortens the waits of the ladder so that KILL comes by then. It also
        applies to a stop in progress.
        """
        self.dispatch(StopRequested(cause, rungs.StopAsked(time.monotonic(), at_once, kill_by)))

    def signal_nowait(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the leader, or to its process group. No effect after the end."""
        self._process.signal(number, to_group=to_group)

    def put_nowait(self, data: bytes) -> PipeWrite:
        """Queue a whole write. Its `done` resolves when the pipe has taken it."""
        assert self._process.stdin is not None
        return self._process.stdin.put(data)

    def note_time(self) -> None:
        """Record a moment that `sweep_nowait` may refer to later."""
        self._process.note_time()

    def sweep_nowait(self, since: float, *, ends: bool) -> None:
        """End the processes that its tree has started since `since` (`loop.time()`).

        With `ends` False, only look for them. The command itself and its older processes continue.
        Call this only after the start.

        `on_fact` gets `SweepEnded` once and in bounded time, but nothing after the end of the
        command.
        """
        self._process.sweep(since, ends=ends)

    def widen_stdout(self) -> None:
        """Enlarge the pipe of stdout for large output."""
        self._process.widen_stdout()

    def look_now(self) -> None:
        """Process pending output and facts, before a conclusion is drawn from their absence."""
        self._process.read_now()
        self._process.hear_now()

    def pause_reading(self) -> None:
        """Stop reading the output, so that the pipe exerts backpressure.

        The idle clock is suspended. A stop ends the pause.
        """
        self._flow.pause()

    def resume_reading(self) -> None:
        self._flow.resume()

    def hold_output(self) -> None:
        """Hold the first output for a possible reader, because nothing else keeps it.

        Then the stream pauses until that reader comes.
        """
        self._flow.hold()

    @property
    def holds_output(self) -> bool:
        """Whether the output is held for a reader that has not come."""
        return self._flow.is_holding

    def awaiting_end(self) -> AbstractContextManager[None]:
        """Mark that a caller waits for the end: output that is neither kept nor read is dropped."""
        return self._flow.awaiting_end()

    def hand_over_nowait(self, hold_seconds: float, secret: bytes) -> asyncio.Future[str]:
        """Begin to give the process to another host: see `KeptProcess.hand_over`.

        Output that was not reported yet goes to the successor. Once the result is there, this
        command is over, with an error that says so. If the future raises, the command continues.
        """
        if self._ladder.phase is not rungs.LadderPhase.RUNNING:
            message = f"cannot hand over command {self.id}: it has exited or is being stopped"
            raise Refused(message, hint="wait for its end", command=self.id)
        handed = self._process.hand_over(hold_seconds, secret)
        handed.add_done_callback(self._on_handed_over)
        return handed

    def _on_handed_over(self, handed: asyncio.Future[str]) -> None:
        if handed.cancelled() or handed.exception() is not None or self.is_over:
            return
        hint = "use the host that has it now"
        message = f"command {self.id} was handed over to another host"
        self._settle(Refused(message, hint=hint, command=self.id))

    def abandon(self) -> None:
        """Give up the command, because its event loop is closed. The keeper ends the process."""
        self._process.abandon()
        self._flow.discard()

    # -- dispatch ---------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Handle one fact, and the facts that its effects cause, such as a stop by a callback."""
        try:
            if (
                self._on_stdout is not None
                and isinstance(fact, BytesRead)
                and fact.stream is Stream.STDOUT
            ):
                # Every token of an agent takes this path.
                if not self.is_over:
                    self._on_stdout(fact)
                    self._count_after_eof(fact)
                return
            self._dispatcher.dispatch(fact)
        except Exception as exc:
            self._crash(exc)
            raise

    def _handle(self, fact: Fact) -> None:
        if self.is_over:
            return  # A late fact. Nothing is delivered after the end.
        if self._on_fact is not None and not isinstance(fact, StopFact):
            self._on_fact(fact)
        match fact:
            case BytesRead():
                self._on_bytes(fact)
            case StreamEnded():
                self._on_stream_end(fact)
            case Started():
                self._progress.wake()
            case StartFailed(error=error):
                self._settle(error)
            case Exited():
                self._account.exited(fact)
                self._climb(fact)
            case NeverStarted(at=at):
                # The command was stopped before its start. There is no exit to wait for, and no
                # tree.
                self._account.blame(self._account.passed_deadline(at) or Ended.HOST_CLOSED)
                self._account.survivors = ()
                self._settle(self._result(drained=True))
            case KeeperActed(rung=rung, at=at):
                self._account.took_rung(rung, at)
                # The keeper acts without an order in two cases. The timeout has passed while this
                # host was frozen, or the host closed the connection or lost its lease.
                self._account.blame(self._account.passed_deadline(at) or Ended.HOST_CLOSED)
            case ProcessesSwept(processes=processes):
                self._account.swept.extend(processes)
            case SweepEnded():
                pass  # Only `on_fact` uses this fact.
            case TreeEnded(survivors=survivors):
                self._account.survivors = survivors
                # The pipes hold all remaining output, and no process is left to feel backpressure.
                self.resume_reading()
                self._climb(fact)
            case rungs.LadderTimerFired() | rungs.InputEndIgnored():
                self._climb(fact)
            case StopRequested(cause=cause, stop=stop):
                self._account.blame(cause)
                self._climb(stop)
            case ClockRanOut(cause=cause):
                self._on_clock(cause)
            case _:
                assert_never(fact)

    # -- output -----------------------------------------------------------------------------------
    def _on_bytes(self, fact: BytesRead) -> None:
        self._flow.add(fact)
        self._count_after_eof(fact)
        limit = self._options.output_total_max
        if limit is not None and self._flow.total > limit:
            self.stop_nowait(Ended.OUTPUT_LIMIT)
        if self._options.on_output is not None:
            try:
                self._options.on_output(fact.stream.value, fact.data)
            except Exception:
                # A bug in the caller's callback must not cost the caller its output: later pieces
                # still arrive.
                if not self._has_callback_failed:
                    message = "on_output failed: reading continues, logged only once (command=%s)"
                    log.exception(message, self.id)
                self._has_callback_failed = True
        self._flow.changed.wake()

    def _count_after_eof(self, fact: BytesRead) -> None:
        if self._ladder.phase is rungs.LadderPhase.EOF and self._eof_timer is not None:
            self._bytes_after_eof += len(fact.data)
            if self._bytes_after_eof > rungs.EOF_OUTPUT_BYTES_MAX:
                self.dispatch(rungs.InputEndIgnored(fact.at))

    def _on_stream_end(self, fact: StreamEnded) -> None:
        self._account.is_output_whole &= fact.is_whole
        self._flow.end(fact.stream)
        if not self._flow.open:
            self._climb(rungs.OutputClosed(fact.at))

    # -- timeouts ---------------------------------------------------------------------------------
    def _set_clock(self, cause: Ended, seconds: float | None) -> None:
        if seconds is not None:
            self._clocks[cause] = self._loop.call_later(
                max(0.0, seconds), self._on_clock_timer, cause
            )

    def _on_clock_timer(self, cause: Ended) -> None:
        # The timer may fire late in a busy loop, while output or the exit waits to be read. Facts
        # that have happened come before conclusions from their absence.
        self.look_now()
        self.dispatch(ClockRanOut(cause))

    def _on_clock(self, cause: Ended) -> None:
        if self._account.exit is not None or self._account.has_cause:
            return
        if cause is Ended.IDLE_TIMEOUT:
            left = self._account.idle_seconds_left(time.monotonic())
            if left > 0:
                self._set_clock(cause, min(left, self._options.idle_timeout or left))
                return
        self.stop_nowait(cause)

    # -- end --------------------------------------------------------------------------------------
    def _climb(self, fact: rungs.Fact) -> None:
        self._ladder, effects = rungs.step(self._ladder, fact)
        self._flow.may_wait = self._ladder.phase is rungs.LadderPhase.RUNNING
        for effect in effects:
            self._perform(effect, fact.at)

    def _perform(self, effect: rungs.Effect, decided_at: float) -> None:
        match effect:
            case rungs.CloseStdin():
                self._step("eof", decided_at)
                if self._process.stdin is not None:
                    self._watch_eof(self._process.stdin.fileno())
                    self._process.stdin.close()
            case rungs.TermGroup(seconds=seconds):
                self._step("term", decided_at)
                self._process.term(seconds)
            case rungs.TermRest(seconds=seconds):
                self._step("rest", decided_at)
                self._process.term_rest(seconds)
            case rungs.KillTree():
                self._step("kill", decided_at)
                self._process.kill()
            case rungs.KillKeeper():
                self._step("keeper", decided_at)
                self._process.kill_keeper()
            case rungs.Hurry(term_at=term_at, kill_at=kill_at):
                self._process.hurry(term_at, kill_at)
            case rungs.CloseOutput():
                self._process.close_output()
            case rungs.StartLadderTimer(at=at, phase=phase):
                self._start_ladder_timer(at, phase)
            case rungs.Settle(drained=drained):
                self._settle(self._result(drained))
            case _:
                assert_never(effect)

    def _step(self, rung: str, decided_at: float) -> None:
        # The ladder counts the grace period from its decision. A later time here would make the
        # period look too short.
        self._account.took_rung(rung, decided_at)
        # A child that is blocked on a full pipe cannot react to a signal, so this ends a pause of
        # reading.
        self.resume_reading()

    def _watch_eof(self, stdin: int) -> None:
        """Look whether the process reacts to the end of its stdin, which is about to be closed."""
        # A process that has closed its stdin itself is about to exit, and gets the whole wait.
        if self.pid is not None and stdin >= 0:
            self._look_later(EofReaction(self.pid, stdin))

    def _look_later(self, reaction: EofReaction) -> None:
        look = partial(self._look_for_reaction, reaction)
        self._eof_timer = self._loop.call_later(EOF_REACTION_SECONDS, look)

    def _look_for_reaction(self, reaction: EofReaction) -> None:
        self.look_now()
        if self._ladder.phase is not rungs.LadderPhase.EOF:
            return
        if reaction.is_impossible():
            self.dispatch(rungs.InputEndIgnored(time.monotonic()))
        else:
            self._look_later(reaction)

    def _start_ladder_timer(self, at: float, phase: rungs.LadderPhase) -> None:
        if self._ladder_timer is not None:
            self._ladder_timer.cancel()
        delay = max(0.0, at - time.monotonic())
        self._ladder_timer = self._loop.call_later(delay, self._on_ladder_timer, phase)

    def _on_ladder_timer(self, phase: rungs.LadderPhase) -> None:
        if phase is rungs.LadderPhase.DRAIN:
            # One readiness callback reads a bounded amount, so a full pipe may still hold unread
            # data.
            self.look_now()
        self.dispatch(rungs.LadderTimerFired(time.monotonic(), phase))

    def _result(self, drained: bool) -> Finished:
        return self._account.result(
            time.monotonic(),
            stdout=self._flow.captures[Stream.STDOUT].finish(),
            stderr=self._flow.captures[Stream.STDERR].finish(),
            drained=drained,
            leader=Survivor(self.pid or 0, self.argv[0], "unknown: its keeper does not answer"),
        )

    def _settle(self, result: Finished | BanksmanError) -> None:
        assert not self.is_over
        self._over_at = time.monotonic()
        for timer in (*self._clocks.values(), self._ladder_timer, self._eof_timer):
            if timer is not None:
                timer.cancel()
        if isinstance(result, Finished):
            self.finished = result
        else:
            self._error = result
            self._flow.discard()
        self._process.close()
        self._flow.end_all()
        self._progress.wake()
        self._on_end(self)

    def _crash(self, exc: Exception) -> None:
        """Fail this command after an internal error. The keeper ends its process tree."""
        self._dispatcher.clear()
        if not self.is_over:
            message, hint = f"internal error: {exc!r}", "report this as a bug in Banksman"
            self._settle(CommandError(message, hint=hint, command=self.id))
