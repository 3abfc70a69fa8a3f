"""The stop of one command: its timeouts, its rungs, and the reaction to the end of its stdin.

`core/stop_ladder.py` decides. This class gives the orders to the process, and starts the timers
whose ends are new facts: those of the rungs, and those of `timeout` and `idle_timeout`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, assert_never

from banksman.commands.options import Options
from banksman.commands.output_streams import CommandOutput
from banksman.commands.result import Ended, ResultBuilder
from banksman.core import stop_ladder as rungs
from banksman.core.process_facts import BytesRead
from banksman.process.eof_reaction import EofReaction
from banksman.process.pipes import PipeWriter

# Time between the end of stdin and the look for a reaction, and between two looks. A thread that
# waits for input is woken by the close itself. Later looks find that another reader has exited.
EOF_REACTION_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ClockRanOut:
    """`timeout` or `idle_timeout` may have passed: see `CommandStop.is_due`."""

    cause: Ended


TimerFact = rungs.LadderTimerFired | rungs.InputEndIgnored | ClockRanOut


class StoppableProcess(Protocol):
    """The part of a process that the ladder needs."""

    @property
    def pid(self) -> int | None: ...
    @property
    def stdin(self) -> PipeWriter | None: ...
    def term(self, seconds: float) -> None: ...
    def term_rest(self, seconds: float) -> None: ...
    def kill(self) -> None: ...
    def kill_keeper(self) -> None: ...
    def hurry(self, term_at: float, kill_at: float) -> None: ...
    def close_output(self) -> None: ...


class CommandStop:
    """The stop ladder and the timeouts of one command, from its start to its end.

    `dispatch`: takes the facts of the timers. `look_now`: reads pending output and facts. `settle`:
    ends the command; its argument is whether the output was read to its end.
    """

    def __init__(
        self,
        options: Options,
        flow: CommandOutput,
        account: ResultBuilder,
        *,
        dispatch: Callable[[TimerFact], None],
        look_now: Callable[[], None],
        settle: Callable[[bool], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ladder = rungs.Ladder(options.timings, is_output_closed=not flow.open)
        self._flow = flow
        self._account = account
        self._dispatch = dispatch
        self._look_now = look_now
        self._settle = settle
        self._idle_timeout = options.idle_timeout
        self._process: StoppableProcess | None = None
        self._clocks: dict[Ended, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        # None until the end of stdin has begun to count.
        self.eof_timer: asyncio.TimerHandle | None = None
        self._bytes_after_eof = 0

    def begin(self, process: StoppableProcess) -> None:
        """Set the process that gets the orders."""
        self._process = process

    @property
    def phase(self) -> rungs.LadderPhase:
        return self._ladder.phase

    @property
    def is_running(self) -> bool:
        """Whether no rung was taken, and the leader has not exited."""
        return self._ladder.phase is rungs.LadderPhase.RUNNING

    def climb(self, fact: rungs.Fact) -> None:
        """Take the rungs that follow from a fact."""
        self._ladder, effects = rungs.step(self._ladder, fact)
        self._flow.may_wait = self.is_running
        for effect in effects:
            self._perform(effect, fact.at)

    def count_after_eof(self, fact: BytesRead) -> None:
        """Count output after the end of stdin: a flood is no reaction to it."""
        if self.eof_timer is not None and self.phase is rungs.LadderPhase.EOF:
            self._bytes_after_eof += len(fact.data)
            if self._bytes_after_eof > rungs.EOF_OUTPUT_BYTES_MAX:
                self._dispatch(rungs.InputEndIgnored(fact.at))

    def cancel(self) -> None:
        """Cancel the timers, because the command is over."""
        for timer in (self._timer, self.eof_timer, *self._clocks.values()):
            if timer is not None:
                timer.cancel()

    # -- timeouts ---------------------------------------------------------------------------------
    def start_clock(self, cause: Ended, seconds: float | None) -> None:
        """Report after these seconds that a timeout may have passed. None: there is no timeout."""
        if seconds is not None:
            self._clocks[cause] = self._loop.call_later(max(0.0, seconds), self._on_clock, cause)

    def _on_clock(self, cause: Ended) -> None:
        # The timer may fire late in a busy loop, while output or the exit waits to be read. Facts
        # that have happened come before conclusions from their absence.
        self._look_now()
        self._dispatch(ClockRanOut(cause))

    def is_due(self, cause: Ended) -> bool:
        """Whether a timeout ends the command now. Output restarts the clock of `idle_timeout`."""
        if self._account.exit is not None or self._account.has_cause:
            return False
        if cause is Ended.IDLE_TIMEOUT:
            left = self._account.idle_seconds_left(time.monotonic())
            if left > 0:
                self.start_clock(cause, min(left, self._idle_timeout or left))
                return False
        return True

    # -- effects ----------------------------------------------------------------------------------
    def _perform(self, effect: rungs.Effect, decided_at: float) -> None:
        process = self._process
        assert process is not None
        match effect:
            case rungs.CloseStdin():
                self._step("eof", decided_at)
                if process.stdin is not None:
                    self._watch_eof(process.pid, process.stdin.fileno())
                    process.stdin.close()
            case rungs.TermGroup(seconds=seconds):
                self._step("term", decided_at)
                process.term(seconds)
            case rungs.TermRest(seconds=seconds):
                self._step("rest", decided_at)
                process.term_rest(seconds)
            case rungs.KillTree():
                self._step("kill", decided_at)
                process.kill()
            case rungs.KillKeeper():
                self._step("keeper", decided_at)
                process.kill_keeper()
            case rungs.Hurry(term_at=term_at, kill_at=kill_at):
                process.hurry(term_at, kill_at)
            case rungs.CloseOutput():
                process.close_output()
            case rungs.StartLadderTimer(at=at, phase=phase):
                self._start_timer(at, phase)
            case rungs.Settle(drained=drained):
                self._settle(drained)
            case _:
                assert_never(effect)

    def _step(self, rung: str, decided_at: float) -> None:
        # The ladder counts the grace period from its decision. A later time here would make the
        # period look too short.
        self._account.took_rung(rung, decided_at)
        # A child that is blocked on a full pipe cannot react to a signal, so this ends a pause of
        # reading.
        self._flow.resume()

    def _watch_eof(self, pid: int | None, stdin: int) -> None:
        """Look whether the process reacts to the end of its stdin, which is about to be closed."""
        # A process that has closed its stdin itself is about to exit, and gets the whole wait.
        if pid is not None and stdin >= 0:
            self._look_later(EofReaction(pid, stdin))

    def _look_later(self, reaction: EofReaction) -> None:
        look = partial(self._look_for_reaction, reaction)
        self.eof_timer = self._loop.call_later(EOF_REACTION_SECONDS, look)

    def _look_for_reaction(self, reaction: EofReaction) -> None:
        self._look_now()
        if self.phase is not rungs.LadderPhase.EOF:
            return
        if reaction.is_impossible():
            self._dispatch(rungs.InputEndIgnored(time.monotonic()))
        else:
            self._look_later(reaction)

    def _start_timer(self, at: float, phase: rungs.LadderPhase) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, at - time.monotonic())
        self._timer = self._loop.call_later(delay, self._on_timer, phase)

    def _on_timer(self, phase: rungs.LadderPhase) -> None:
        if phase is rungs.LadderPhase.DRAIN:
            # One readiness callback reads a bounded amount, so a full pipe may still hold unread
            # data.
            self._look_now()
        self._dispatch(rungs.LadderTimerFired(time.monotonic(), phase))
