"""A command as it runs: one door for all that happens to it, from the call to the proof that nothing of it is left.

It owns a process, its output, its clocks and its place on the stop ladder. Everything that happens to it, from the
keeper, the pipes, the timers or a caller, enters by `dispatch`, one fact at a time, and nothing there suspends. So
there is no task to cancel and no lock to hold: a caller that is cancelled stops waiting, and the teardown goes on.
What callers wait for is in command.py.
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
from banksman.errors import BanksmanError, CommandError
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.pipes import PipeWrite
from banksman.process.process import Process
from banksman.tasks import Waiters

if TYPE_CHECKING:
    from banksman.process.portable import PortableProcess

log = logging.getLogger("banksman")

# Where there is no subreaper a command has no keeper, and G6 is best effort.
PROCESS: type[Process | PortableProcess]
if sys.platform == "linux":
    PROCESS = Process  # pyright: ignore[reportConstantRedefinition]
else:
    from banksman.process import portable

    PROCESS = portable.PortableProcess

# How much longer than its timeout the keeper lets a command run before it stops it without being told: the host's own
# timer comes first, unless the host is frozen.
KEEPER_TIMEOUT_MARGIN_SECONDS = 1.0


class State(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A caller wants it ended, for this reason."""

    cause: Ended
    stop: rungs.StopAsked


@dataclass(frozen=True, slots=True)
class ClockRanOut:
    """`timeout` or `idle_timeout` may have passed; looked at again before it is believed."""

    cause: Ended


Fact = ProcessFact | rungs.LadderTimerFired | StopRequested | ClockRanOut


class Reports(Protocol):
    """Ends of commands that are still to be reported, each once."""

    def owe_report(self, command: Any) -> None: ...
    def take_report(self, command: Any) -> bool: ...


class RunningCommand:
    """What is behind a `Command`. All methods are for the loop it was started in."""

    def __init__(
        self,
        launch: Launch,
        options: Options,
        *,
        id: str,
        on_end: Callable[[Self], None],
        on_fact: Callable[[ProcessFact], None] | None = None,
        matchers: MatcherPool | None = None,
        reports: Reports | None = None,
        lease: LeasePage | None = None,
    ) -> None:
        """`on_fact` is told what the process does, before it is acted on, and nothing after the end. `matchers` search
        for `watch`. `reports`: where its end is to be reported. `lease`: how long it may live at most, also if nobody
        stops it."""
        self.id = id
        self.argv = tuple(word.decode("utf-8", "replace") for word in launch.argv)
        self.finished: Finished | None = None
        self._options = options
        self._on_end = on_end
        self._on_fact = on_fact
        self._matchers = matchers
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._account = ResultBuilder(time.monotonic(), options)
        self._dispatcher = Dispatcher(self._handle)
        self._flow = CommandOutput(options, self._account)
        self._ladder = rungs.Ladder(options.timings, is_output_closed=not self._flow.open)
        self._ladder_timer: asyncio.TimerHandle | None = None
        self._clocks: dict[Ended, asyncio.TimerHandle] = {}
        self._error: BanksmanError | None = None
        self._over_at = 0.0
        # Not woken by output: a flood must not wake those who wait for the end once per piece.
        self._progress = Waiters()
        self._has_callback_failed = False
        timeout = options.timeout
        self._process = PROCESS(
            launch,
            stdin="pipe" if isinstance(options.stdin, bytes) else options.stdin or "null",
            grace=options.grace,
            linger=options.linger,
            deadline=None if timeout is None else timeout + KEEPER_TIMEOUT_MARGIN_SECONDS,
            on_fact=self.dispatch,
            terminal=options.terminal,
            lease=lease,
            outputs=options.outputs,
        )
        self._flow.begin(self._process)
        if isinstance(options.stdin, bytes):
            assert self._process.stdin is not None
            self._process.stdin.put(options.stdin)
            self._process.stdin.end()
        elif options.ends_input and self._process.stdin is not None:
            self._process.stdin.end()
        self._set_clock(Ended.TIMEOUT, timeout)
        self._set_clock(Ended.IDLE_TIMEOUT, options.idle_timeout)

    def __repr__(self) -> str:
        return f"<Command {self.id} {self.state} pid={self.pid} {' '.join(self.argv)!r}>"

    # -- at a look -----------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        return self._process.pid

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
        return self.is_over and self._over_at < at

    def result(self) -> Finished:
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self.finished is not None
        return self.finished

    def take_report(self) -> bool:
        """Count the end as reported. False if it was reported before, or need not be."""
        return self._reports is not None and self._reports.take_report(self)

    def return_report(self) -> None:
        """The caller that `take_report` was called for is gone: report the end to the next one."""
        if self._reports is not None:
            self._reports.owe_report(self)

    @property
    def keeps_output(self) -> bool:
        return self._options.keep_output

    def has_output(self, stream: Stream, after: int) -> bool:
        """There is some from byte `after` on, or there will be none."""
        return self.written(stream) > after or self._flow.has_ended(stream)

    def written(self, stream: Stream) -> int:
        return self._flow.captures[stream].total

    # -- what is done at once ------------------------------------------------------------------------------------------
    def stop_nowait(self, cause: Ended = Ended.STOPPED, *, at_once: bool = False, kill_by: float | None = None) -> None:
        """Begin to end it, as `stop` does, and return at once: the command goes down the ladder by itself. It may be
        called in callbacks such as `on_output`. Nothing happens if it has ended; wait for the end by `wait`.

        `cause` is what `Finished.ended` will say. `at_once`: KILL, without the rungs before it. `kill_by`
        (`time.monotonic()`): the waits of the ladder are cut so that KILL has come by then, also of a stop that is
        under way.
        """
        self.dispatch(StopRequested(cause, rungs.StopAsked(time.monotonic(), at_once, kill_by)))

    def put_nowait(self, data: bytes) -> PipeWrite:
        """Queue a whole write; its `done` tells when the pipe has taken it."""
        assert self._process.stdin is not None
        return self._process.stdin.put(data)

    def note_time(self) -> None:
        """Something begins now that `sweep_nowait` may be asked about later."""
        self._process.note_time()

    def sweep_nowait(self, since: float, *, ends: bool) -> None:
        """End what its tree has grown since then (`loop.time()`), or with `ends` False only look for it; the command
        itself goes on, and so does what it had started before. Only once it has started.

        `on_fact` is told `SweepEnded` once and in a bounded time, but nothing after the end of the command.
        """
        self._process.sweep(since, ends=ends)

    def widen_stdout(self) -> None:
        """Its output will be large, and is worth a larger pipe."""
        self._process.widen_stdout()

    def look_now(self) -> None:
        """Take what the process has said and done already, before something is concluded from its silence."""
        self._process.read_now()
        self._process.hear_now()

    def pause_reading(self) -> None:
        """Stop reading its output, so that the pipe pushes back. The idle clock stands still; being stopped ends it."""
        self._flow.pause()

    def resume_reading(self) -> None:
        self._flow.resume()

    def hold_output(self) -> None:
        """Nothing keeps its output: hold the beginning for a reader that may come, and let the rest wait for it."""
        self._flow.hold()

    @property
    def holds_output(self) -> bool:
        """Whether its output is held for a reader that has not come yet."""
        return self._flow.is_holding

    def awaiting_end(self) -> AbstractContextManager[None]:
        """Inside this block a caller waits for the end: output that is neither kept nor read is dropped."""
        return self._flow.awaiting_end()

    def abandon(self) -> None:
        """The loop is closed: nobody will ever hear of this command again. The keeper ends it."""
        self._process.abandon()
        self._flow.discard()

    # -- the door ----------------------------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Take one fact, and the facts that its effects bring (a callback that stops us), to the end."""
        try:
            self._dispatcher.dispatch(fact)
        except Exception as exc:
            self._crash(exc)
            raise

    def _handle(self, fact: Fact) -> None:
        if self.is_over:
            return  # Late. Nothing is delivered after the end.
        if self._on_fact is not None and not isinstance(fact, rungs.LadderTimerFired | StopRequested | ClockRanOut):
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
                # Stopped before it began: there was no exit to wait for, and no tree.
                self._account.blame(self._account.passed_deadline(at) or Ended.HOST_CLOSED)
                self._account.survivors = ()
                self._settle(self._result(drained=True))
            case KeeperActed(rung=rung, at=at):
                self._account.took_rung(rung, at)
                self._account.blame(self._account.passed_deadline(at) or Ended.HOST_CLOSED)
            case ProcessesSwept(processes=processes):
                self._account.swept.extend(processes)
            case SweepEnded():
                pass  # For `on_fact` alone.
            case TreeEnded(survivors=survivors):
                self._account.survivors = survivors
                # What is still in the pipes is all there will be; nobody is pushed back by not reading it.
                self.resume_reading()
                self._climb(fact)
            case rungs.LadderTimerFired():
                self._climb(fact)
            case StopRequested(cause=cause, stop=stop):
                self._account.blame(cause)
                self._climb(stop)
            case ClockRanOut(cause=cause):
                self._on_clock(cause)
            case _:
                assert_never(fact)

    # -- output ------------------------------------------------------------------------------------------------------
    def _on_bytes(self, fact: BytesRead) -> None:
        self._flow.add(fact)
        limit = self._options.output_total_max
        if limit is not None and self._flow.total > limit:
            self.stop_nowait(Ended.OUTPUT_LIMIT)
        if self._options.on_output is not None:
            try:
                self._options.on_output(fact.stream.value, fact.data)
            except Exception:
                # The caller's bug must not cost the caller its output: later pieces still arrive.
                if not self._has_callback_failed:
                    log.exception("! on_output raised; reading goes on, and this is said once")
                self._has_callback_failed = True
        self._flow.changed.wake()

    def _on_stream_end(self, fact: StreamEnded) -> None:
        self._account.is_output_whole &= fact.is_whole
        self._flow.end(fact.stream)
        if not self._flow.open:
            self._climb(rungs.OutputClosed(fact.at))

    # -- clocks ------------------------------------------------------------------------------------------------------
    def _set_clock(self, cause: Ended, seconds: float | None) -> None:
        if seconds is not None:
            self._clocks[cause] = self._loop.call_later(max(0.0, seconds), self._on_clock_timer, cause)

    def _on_clock_timer(self, cause: Ended) -> None:
        # The timer may have run late, behind a busy loop, while output or the exit were waiting to be read. What has
        # happened comes before what we conclude from its absence.
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

    # -- the end -----------------------------------------------------------------------------------------------------
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
        # The ladder counts the grace from its decision. A later time here would make the grace look cut short.
        self._account.took_rung(rung, decided_at)
        # A child that is blocked on a full pipe cannot react to anything, so a pause of the reading ends here.
        self.resume_reading()

    def _start_ladder_timer(self, at: float, phase: rungs.LadderPhase) -> None:
        if self._ladder_timer is not None:
            self._ladder_timer.cancel()
        delay = max(0.0, at - time.monotonic())
        self._ladder_timer = self._loop.call_later(delay, self._on_ladder_timer, phase)

    def _on_ladder_timer(self, phase: rungs.LadderPhase) -> None:
        if phase is rungs.LadderPhase.DRAIN:
            # One readiness callback reads a bounded amount, so the rest of a full pipe may still wait to be read.
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
        for timer in (*self._clocks.values(), *([self._ladder_timer] if self._ladder_timer else [])):
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
        """A bug of ours. It fails this one command, loudly, and its tree is ended by the keeper."""
        self._dispatcher.clear()
        if not self.is_over:
            self._settle(CommandError(f"internal error: {exc!r}", hint="please report this", command=self.id))
