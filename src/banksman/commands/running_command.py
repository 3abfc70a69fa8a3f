"""A running command: the owner of its process, output, timers and stop ladder.

Its life reaches from the call to the proof that no process of its tree is left. Every fact, from
the keeper, the pipes, the timers or a caller, enters by `dispatch`, one at a time, and no handler
suspends. Therefore no task has to be cancelled and no lock is needed. A cancelled caller stops
waiting, and the teardown continues. command.py has the methods that wait, and the hand-over. The
process of an agent is a command too (sessions/agent_process.py).
"""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, assert_never

from banksman.commands.command_stop import ClockRanOut, CommandStop
from banksman.commands.options import Options
from banksman.commands.output import Output
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
from banksman.errors import BanksmanError, CommandError
from banksman.process.adoption import AdoptedProcess, Claimed
from banksman.process.kept_process import KeptProcess
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.pipes import PipeWrite, PipeWriter
from banksman.process.process import ChildProcess
from banksman.tasks import Waiters

if TYPE_CHECKING:
    from banksman.commands.command_state import CommandState
    from banksman.process.portable import PortableProcess
    from banksman.process.tree_hand_over import Survival

log = logging.getLogger("banksman")

# Without a subreaper a command has no keeper, and guarantee G6 (docs/guarantees.md) is best effort.
PROCESS: type[ChildProcess | PortableProcess]
if sys.platform == "linux":
    PROCESS = ChildProcess  # pyright: ignore[reportConstantRedefinition]
else:
    from banksman.process import portable

    PROCESS = portable.PortableProcess

# Extra time until the keeper stops a command after its timeout without an order. The host's timer
# fires first, unless the host is frozen.
KEEPER_TIMEOUT_MARGIN_SECONDS = 1.0


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
        state: CommandState | None = None,
        survival: Survival | None = None,
    ) -> None:
        """Start the process, or take over a claimed one.

        A process that was taken over keeps its start time, from which `timeout` counts. `options`
        are those of its start. `state`: what the old host knew of the command.

        `on_fact`: called with each process fact before it is handled, and never after the end.
        `on_stdout`: takes the output of stdout, which is then neither kept nor counted here.
        `matchers`: helpers for `watch`. `reports`: the registry that reports its end. `lease`:
        limits the life of the process even if no caller stops it. `survival`: the process survives
        the death of this host. Its keeper then stays after the end, until `release`.
        """
        self.id = id
        # Started for a caller that may come back to it: it is handed over to the next host.
        self.is_background = False
        self.argv = tuple(word.decode("utf-8", "replace") for word in launch.argv)
        self.finished: Finished | None = None
        # The person or program that started it.
        self.caller = options.caller
        self._options = options
        self._on_end = on_end
        self._on_fact = on_fact
        self._on_stdout = on_stdout
        self._matchers = matchers
        self._reports = reports
        now = time.monotonic()
        began = launch.started_at if isinstance(launch, Claimed) else now
        self._account = ResultBuilder(began, options)
        self._account.last_output = now
        self._dispatcher = Dispatcher(self._handle)
        self._flow = CommandOutput(options, self._account)
        if state is not None:
            self._restore(state, now)
        self._ladder = CommandStop(
            options,
            self._flow,
            self._account,
            dispatch=self.dispatch,
            look_now=self.look_now,
            settle=lambda drained: self._settle(self._result(drained)),
        )
        self._error: BanksmanError | None = None
        self._over_at = 0.0
        # Not woken by output: a flood must not wake the tasks that wait for the end once for each
        # piece.
        self._progress = Waiters()
        self._last_write: PipeWrite | None = None
        self._has_callback_failed = False
        timeout = options.timeout
        self._process: ChildProcess | PortableProcess | AdoptedProcess
        if isinstance(launch, Claimed):
            self._process = AdoptedProcess(launch, on_fact=self.dispatch)
            if survival is not None:
                self._process.survive(survival)
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
                **({} if survival is None else {"survival": survival}),
            )
            self._begin_input(self._process.stdin)
        self._flow.begin(self._process)
        self._ladder.begin(self._process)
        self._ladder.start_clock(
            Ended.TIMEOUT, None if timeout is None else timeout - (now - began)
        )
        self._ladder.start_clock(Ended.IDLE_TIMEOUT, options.idle_timeout)

    def _restore(self, state: CommandState, now: float) -> None:
        self._flow.restore(state.captures)
        # The old host may have paused its reading, which counts as no silence.
        self._account.last_output = min(state.last_output, now)
        self._account.is_output_whole = state.is_output_whole
        self._account.swept.extend(state.swept)

    def _begin_input(self, stdin: PipeWriter | None) -> None:
        """Write the input that was given with the options, if any."""
        if isinstance(self._options.stdin, bytes):
            assert stdin is not None
            self._last_write = stdin.put(self._options.stdin)
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
        if not self._ladder.is_running:
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

    def kept(self, stream: Stream) -> Output:
        """Return the output of a stream so far, as far as memory keeps it."""
        return self._flow.captures[stream].kept()

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
        self._last_write = self._process.stdin.put(data)
        return self._last_write

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

    def settle_output(self, stream: Stream, offset: int | None = None) -> None:
        """Note that output before the offset is durable: see `KeptProcess.settle`."""
        if isinstance(self._process, KeptProcess):
            self._process.settle(stream, offset)

    def forgo_survival(self) -> None:
        """Let the process end with this host after all: see `KeptProcess.forgo`."""
        if isinstance(self._process, KeptProcess):
            self._process.forgo()

    def release(self) -> None:
        """Release the keeper of a command that is over, because its end is durable."""
        assert self.is_over
        self._process.close()

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
                if self.finished is None and self._error is None:
                    self._on_stdout(fact)
                    if self._ladder.eof_timer is not None:
                        self._ladder.count_after_eof(fact)
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
                self._ladder.climb(fact)
            case NeverStarted(at=at):
                # The command was stopped before its start. There is no exit to wait for, and no
                # tree.
                self._account.blame(self._account.passed_deadline(at) or Ended.HOST_CLOSED)
                self._account.survivors = ()
                self._settle(self._result(drained=True))
            case KeeperActed(rung=rung, at=at):
                self._account.keeper_acted(rung, at)
            case ProcessesSwept(processes=processes):
                self._account.swept.extend(processes)
            case SweepEnded():
                pass  # Only `on_fact` uses this fact.
            case TreeEnded(survivors=survivors):
                self._account.survivors = survivors
                # The pipes hold all remaining output, and no process is left to feel backpressure.
                self.resume_reading()
                self._ladder.climb(fact)
            case rungs.LadderTimerFired() | rungs.InputEndIgnored():
                self._ladder.climb(fact)
            case StopRequested(cause=cause, stop=stop):
                self._account.blame(cause)
                self._ladder.climb(stop)
            case ClockRanOut(cause=cause):
                self._on_clock(cause)
            case _:
                assert_never(fact)

    # -- output -----------------------------------------------------------------------------------
    def _on_bytes(self, fact: BytesRead) -> None:
        self._flow.add(fact)
        self._ladder.count_after_eof(fact)
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

    def _on_stream_end(self, fact: StreamEnded) -> None:
        self._account.is_output_whole &= fact.is_whole
        self._flow.end(fact.stream)
        if not self._flow.open:
            self._ladder.climb(rungs.OutputClosed(fact.at))

    def _on_clock(self, cause: Ended) -> None:
        if self._ladder.is_due(cause):
            self.stop_nowait(cause)

    # -- end --------------------------------------------------------------------------------------
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
        self._ladder.cancel()
        if isinstance(result, Finished):
            self.finished = result
        else:
            self._error = result
            self._flow.discard()
        if not (isinstance(result, Finished) and self._is_lasting):
            self._process.close()
        self._flow.end_all()
        self._progress.wake()
        self._on_end(self)

    @property
    def _is_lasting(self) -> bool:
        process = self._process
        return isinstance(process, KeptProcess) and process.is_lasting

    def _crash(self, exc: Exception) -> None:
        """Fail this command after an internal error. The keeper ends its process tree."""
        self._dispatcher.clear()
        if not self.is_over:
            message, hint = f"internal error: {exc!r}", "report this as a bug in Banksman"
            self._settle(CommandError(message, hint=hint, command=self.id))
