"""One command, from the call to the proof that nothing of it is left.

It owns a process, its output, its clocks and its place on the stop ladder. Everything that happens to it, from the
keeper, the pipes, the timers or a caller, enters by `dispatch`, one fact at a time, and nothing there suspends. So
there is no task to cancel and no lock to hold: a caller that is cancelled stops waiting, and the teardown goes on.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from banksman.core import ladder as rungs
from banksman.core.facts import (
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
    TreeEnded,
)
from banksman.errors import BanksmanError, CommandError, Refused, UsageError
from banksman.run.child.launch import Launch
from banksman.run.child.pipes import Writing
from banksman.run.child.portable import PortableProcess
from banksman.run.child.process import Process
from banksman.run.commands.account import Account
from banksman.run.commands.finished import Ended, Finished
from banksman.run.commands.options import Options, check_seconds, check_size, endless_beyond
from banksman.run.commands.output import Capture
from banksman.run.commands.watching import Match, StartAside, check_pattern, watch
from banksman.run.waiters import Waiters

log = logging.getLogger("banksman")

# Where there is no subreaper a command has no keeper, and G6 is best effort.
PROCESS: type[Process | PortableProcess] = Process if sys.platform == "linux" else PortableProcess

# How much longer than its timeout the keeper lets a command run before it stops it without being told: the host's own
# timer comes first, unless the host is frozen.
KEEPER_TIMEOUT_MARGIN_SECONDS = 1.0


class State(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a command's output. `next` is where to read on; `missed` bytes before it are gone."""

    data: bytes
    next: int
    missed: int
    is_end: bool

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Stopped:
    """A caller wants it ended, for this reason."""

    cause: Ended
    at: float
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ClockRanOut:
    """`timeout` or `idle_timeout` may have passed; looked at again before it is believed."""

    cause: Ended


Fact = ProcessFact | rungs.TimerFired | Stopped | ClockRanOut


class Command:
    """A command that was started. Made by the host; all methods are for the loop it was started in."""

    def __init__(
        self,
        launch: Launch,
        options: Options,
        *,
        id: str,
        on_end: Callable[[Command], None],
        on_fact: Callable[[ProcessFact], None] | None = None,
        start_aside: StartAside | None = None,
    ) -> None:
        """`on_fact` is told what the process does, before it is acted on, and nothing after the end. `start_aside`
        starts a command of our own, for `watch`."""
        self.id = id
        self.argv = tuple(word.decode("utf-8", "replace") for word in launch.argv)
        self.finished: Finished | None = None
        self._options = options
        self._on_end = on_end
        self._on_fact = on_fact
        self._start_aside = start_aside
        self._loop = asyncio.get_running_loop()
        self._account = Account(time.monotonic(), options)
        self._facts: deque[Fact] = deque()
        self._is_dispatching = False
        self._ladder = rungs.Ladder(options.timings)
        self._ladder_timer: asyncio.TimerHandle | None = None
        self._clocks: dict[Ended, asyncio.TimerHandle] = {}
        self._captures = {stream: Capture(options.output_bytes_max, options.spill_bytes_max) for stream in Stream}
        if not options.keeps_stdout:
            self._captures[Stream.STDOUT] = Capture(0, 0)
        # A terminal has one stream for both; the other one is empty, and has ended.
        self._open_streams = set(Stream) if options.terminal is None else {Stream.STDOUT}
        self._error: BanksmanError | None = None
        self._over_at = 0.0
        # Two, because a flood of output must not wake those who wait for the end once per piece.
        self._progress = Waiters()
        self._output = Waiters()
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
        )
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

    # -- for callers -------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def state(self) -> State:
        if self.is_over:
            return State.ENDED
        if self._ladder.phase is not rungs.Phase.RUNNING:
            return State.STOPPING
        return State.STARTING if self.pid is None else State.RUNNING

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self._error is not None

    def ended_before(self, at: float) -> bool:
        return self.is_over and self._over_at < at

    async def wait(self) -> Finished:
        """The end. Cancelling this only stops waiting. Raises if the command could not be started."""
        while not self.is_over:
            await self._progress.wait()
        return self.result()

    async def wait_started(self) -> None:
        while self.pid is None and not self.is_over:
            await self._progress.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def result(self) -> Finished:
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self.finished is not None
        return self.finished

    async def stop(self, *, at_once: bool = False) -> Finished:
        """End it by the ladder, or `at_once` by KILL; returns when it is over. May be called again, and by several."""
        self.stop_nowait(at_once=at_once)
        return await self.wait()

    def stop_nowait(self, cause: Ended = Ended.STOPPED, *, at_once: bool = False) -> None:
        self.dispatch(Stopped(cause, time.monotonic(), at_once))

    async def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the leader, or to its process group. Nothing happens if it has ended."""
        wanted: Any = number
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= 64:
            raise UsageError(f"there is no signal {number!r}", hint="use a member of signal.Signals")
        await self.wait_started()
        self._process.signal(int(number), to_group=group)

    async def read(self, *, after: int = 0, stream: str = "stdout", bytes_max: int = 65536) -> Piece:
        """Output from byte `after` on; waits until there is some or the stream has ended. Read on from `next`."""
        which = _stream(stream)
        if after < 0 or bytes_max < 1:
            hint = "after is a byte's number from 0 on, bytes_max at least 1"
            raise UsageError(f"cannot read {bytes_max!r} bytes after {after!r}", hint=hint)
        while not self.has_output(which, after):
            await self._output.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        capture = self._captures[which]
        data, begin = capture.read(min(after, capture.total), bytes_max)
        following = begin + len(data)
        has_ended = which not in self._open_streams or self.is_over
        return Piece(data, following, max(0, begin - after), has_ended and following >= capture.total)

    def has_output(self, stream: Stream, after: int) -> bool:
        """There is some from byte `after` on, or there will be none."""
        return self.written(stream) > after or stream not in self._open_streams or self.is_over

    def written(self, stream: Stream) -> int:
        return self._captures[stream].total

    async def watch(
        self, pattern: str | bytes, *, after: int = 0, stream: str = "stdout", timeout: float | None = None
    ) -> Match | None:
        """The first match of a regular expression in the output from byte `after` on: at once, if it is there already,
        else as soon as it is. None if the stream ends without one, or `timeout` seconds pass.

        `^` and `$` are the ends of a line. A match of more than 64 KiB may be missed. Cancelling leaves nothing; and
        any number may watch at once. `UsageError` for a pattern that is none, or takes longer than 10 s for one piece
        of the output.
        """
        which = _stream(stream)
        check_pattern(pattern)
        first: Any = after
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UsageError(f"cannot watch after {after!r}", hint="after is a byte's number from 0 on")
        if timeout is not None:
            check_seconds("timeout", timeout)
        seconds = endless_beyond(timeout)
        return await watch(self, pattern, after=after, stream=which, timeout=seconds, start_aside=self._start_aside)

    async def write(self, data: bytes, *, timeout: float | None = None) -> None:
        """Write to stdin, or type at its terminal, whole and in order.

        Past `timeout` seconds: `Refused`, and nothing of it was written; or, if the pipe had taken a part, stdin is
        closed, because nothing may follow half a write. Cancelled, it is taken back, or if it has begun, finished in
        the background.
        """
        stdin = self._process.stdin
        if stdin is None or isinstance(self._options.stdin, bytes):
            raise UsageError("this command has no stdin to write to", hint='start it with stdin="pipe" or pty=True')
        if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"cannot write {data!r:.60}", hint="bytes; encode text first")
        if timeout is not None:
            check_seconds("timeout", timeout)
        writing = stdin.put(bytes(data))
        try:
            async with asyncio.timeout(endless_beyond(timeout)):
                await asyncio.shield(writing.done)
        except TimeoutError:
            if writing.done.done():
                return writing.done.result()  # Taken whole, in the very pass of the loop in which the time was up.
            if stdin.withdraw(writing):
                raise Refused("the command did not take its stdin in time; nothing was written") from None
            stdin.close()
            raise Refused("the command took only a part of it in time; its stdin is now closed") from None
        except asyncio.CancelledError:
            stdin.withdraw(writing)
            raise

    def put_nowait(self, data: bytes) -> Writing:
        """Queue a whole write; its `done` tells when the pipe has taken it."""
        assert self._process.stdin is not None
        return self._process.stdin.put(data)

    def widen_stdout(self) -> None:
        """Its output will be large, and is worth a larger pipe."""
        self._process.widen_stdout()

    def look_now(self) -> None:
        """Take what the process has said and done already, before something is concluded from its silence."""
        self._process.read_now()
        self._process.hear_now()

    async def close_stdin(self) -> None:
        """End its stdin, after what is still to be written. At a terminal the end of the input is typed (Ctrl-D at the
        start of a line), and more may be typed after it."""
        if self._process.stdin is not None:
            self._process.stdin.end()

    async def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size; what runs in the foreground there gets SIGWINCH. Nothing happens if it has
        ended."""
        if self._options.terminal is None:
            raise UsageError("this command has no terminal to resize", hint="start it with pty=True")
        size = check_size(rows, columns)
        await self.wait_started()
        try:
            self._process.resize(size)
        except OSError as exc:
            raise CommandError(f"its terminal cannot be resized any more: {exc.strerror}", command=self.id) from exc

    def pause_reading(self) -> None:
        """Stop reading its output, so that the pipe pushes back. The idle clock stands still; being stopped ends it."""
        if self._ladder.phase is rungs.Phase.RUNNING:
            self._process.pause_reading()
            # It is we who are idle now.
            self._account.last_output = math.inf

    def resume_reading(self) -> None:
        self._process.resume_reading()
        self._account.last_output = min(self._account.last_output, time.monotonic())

    def abandon(self) -> None:
        """The loop is closed: nobody will ever hear of this command again. The keeper ends it."""
        self._process.abandon()
        for capture in self._captures.values():
            capture.discard()

    # -- the door ----------------------------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Take one fact to its end. A fact that is born meanwhile (a callback that stops us) waits its turn."""
        self._facts.append(fact)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._facts:
                self._take(self._facts.popleft())
        except Exception as exc:
            self._crash(exc)
            raise
        finally:
            self._is_dispatching = False

    def _take(self, fact: Fact) -> None:
        if self.is_over:
            return  # Late. Nothing is delivered after the end.
        if self._on_fact is not None and not isinstance(fact, rungs.TimerFired | Stopped | ClockRanOut):
            self._on_fact(fact)
        match fact:
            case BytesRead():
                self._on_bytes(fact)
            case StreamEnded(stream=stream, at=at, is_whole=is_whole):
                self._account.is_output_whole &= is_whole
                self._open_streams.discard(stream)
                self._output.wake()
                if not self._open_streams:
                    self._climb(rungs.OutputClosed(at))
            case Started():
                self._progress.wake()
            case StartFailed(error=error):
                self._settle(error)
            case Exited():
                self._account.exited(fact)
                self._climb(rungs.LeaderExited(fact.at))
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
            case TreeEnded(survivors=survivors, at=at):
                self._account.survivors = survivors
                # What is still in the pipes is all there will be; nobody is pushed back by not reading it.
                self.resume_reading()
                self._climb(rungs.TreeGone(at))
            case rungs.TimerFired():
                self._climb(fact)
            case Stopped(cause=cause, at=at, at_once=at_once):
                self._account.blame(cause)
                self._climb(rungs.StopAsked(at, at_once))
            case ClockRanOut(cause=cause):
                self._on_clock(cause)
            case _:
                assert_never(fact)

    # -- output ------------------------------------------------------------------------------------------------------
    def _on_bytes(self, fact: BytesRead) -> None:
        self._account.last_output = fact.at
        self._captures[fact.stream].add(fact.data)
        limit = self._options.output_total_max
        if limit is not None and sum(capture.total for capture in self._captures.values()) > limit:
            self.stop_nowait(Ended.OUTPUT_LIMIT)
        if self._options.on_output is not None:
            try:
                self._options.on_output(fact.stream.value, fact.data)
            except Exception:
                # The caller's bug must not cost the caller its output: later pieces still arrive.
                if not self._has_callback_failed:
                    log.exception("! on_output raised; reading goes on, and this is said once")
                self._has_callback_failed = True
        self._output.wake()

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
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: rungs.Effect) -> None:
        match effect:
            case rungs.CloseStdin():
                self._step("eof")
                if self._process.stdin is not None:
                    self._process.stdin.close()
            case rungs.TermGroup(seconds=seconds):
                self._step("term")
                self._process.term(seconds)
            case rungs.TermRest(seconds=seconds):
                self._step("rest")
                self._process.term_rest(seconds)
            case rungs.KillTree():
                self._step("kill")
                self._process.kill()
            case rungs.KillKeeper():
                self._step("keeper")
                self._process.kill_keeper()
            case rungs.CloseOutput():
                self._process.close_output()
            case rungs.StartTimer(at=at, phase=phase):
                self._start_ladder_timer(at, phase)
            case rungs.Settle(drained=drained):
                self._settle(self._result(drained))
            case _:
                assert_never(effect)

    def _step(self, rung: str) -> None:
        self._account.took_rung(rung, time.monotonic())
        # A child that is blocked on a full pipe cannot react to anything, so a pause of the reading ends here.
        self.resume_reading()

    def _start_ladder_timer(self, at: float, phase: rungs.Phase) -> None:
        if self._ladder_timer is not None:
            self._ladder_timer.cancel()
        delay = max(0.0, at - time.monotonic())
        self._ladder_timer = self._loop.call_later(delay, self._on_ladder_timer, phase)

    def _on_ladder_timer(self, phase: rungs.Phase) -> None:
        self.dispatch(rungs.TimerFired(time.monotonic(), phase))

    def _result(self, drained: bool) -> Finished:
        return self._account.result(
            time.monotonic(),
            stdout=self._captures[Stream.STDOUT].finish(),
            stderr=self._captures[Stream.STDERR].finish(),
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
            for capture in self._captures.values():
                capture.discard()
        self._process.close()
        self._progress.wake()
        self._output.wake()
        self._on_end(self)

    def _crash(self, exc: Exception) -> None:
        """A bug of ours. It fails this one command, loudly, and its tree is ended by the keeper."""
        if not self.is_over:
            self._settle(CommandError(f"internal error: {exc!r}", hint="please report this", command=self.id))


def _stream(name: str) -> Stream:
    try:
        return Stream(name)
    except ValueError:
        raise UsageError(f"there is no stream {name!r}", hint='it is "stdout" or "stderr"') from None
