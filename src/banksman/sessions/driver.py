"""Driver of a session: feeds facts to the state machine and performs the effects.

`dispatch(fact)` processes one fact at a time, to the end, without suspending. The driver owns the
state, the process and the timers. Only the driver reads the pipe (`frame_reader.py`) and writes to
it. It passes each fact to the pure core and performs the returned effects in order. It decides only
about backpressure, and about an agent that has closed its stdout and does not exit. Effects for
callers go to `outcome_listener.py`, and log entries to `log_writer.py`. Other threads must use the
loop's `call_soon_threadsafe`.

A bug in Banksman (an assert, an unexpected exception) fails only this session. The error is logged
with the recorder's facts, the process is ended and the callers get an error. Other sessions are not
affected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
from functools import partial
from typing import assert_never

from msgspec.structs import replace

from banksman.core.process_facts import (
    BytesRead,
    Exited,
    FrameWritten,
    ProcessGone,
    Report,
    Started,
    StartFailed,
    StreamEnded,
    SweepEnded,
    WriteFailed,
)
from banksman.core.session import ask_queue
from banksman.core.session import step as core
from banksman.core.session.effects import (
    Append,
    CancelTimer,
    Effect,
    Finish,
    HoldConversation,
    ReportIdle,
    ReportReady,
    StartProcess,
    StartTimer,
    StopProcess,
    SweepTools,
    WriteFrame,
)
from banksman.core.session.facts import (
    AppendFailed,
    CloseAsked,
    Committed,
    ConversationTaken,
    EvictAsked,
    Fact,
    ProcessReported,
    Subject,
    TimerFired,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.questions import kept
from banksman.core.session.state import ProcessPhase, Session
from banksman.core.session.turn import Turn
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.core.wire.redaction import Redactor
from banksman.dispatcher import Dispatcher
from banksman.errors import AgentError, BanksmanError, BugError, NotOwner, StoreError
from banksman.sessions.agent_process import AgentProcess, AgentReport, Spawn, redacted
from banksman.sessions.diagnostics import Counters, Recorder, TurnTimes
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener, tell
from banksman.sessions.pool import Pool
from banksman.store.log import Log

log = logging.getLogger("banksman")

# The end of stdout is nearly always the beginning of an agent's exit. An agent that still lives
# after this time can neither answer nor be interrupted.
MUTE_SECONDS_MAX = 1.0


class PoolSlot(enum.Enum):
    """Slot in the pool: not wanted, queued, or granted.

    A granted slot may still have no process.
    """

    NONE, WANTED, GIVEN = range(3)


class Driver:
    """Driver of one session since the claim under this epoch.

    Belongs to one event loop. `spawn`: starts the agent. `listener`: receives the results for
    callers.
    """

    def __init__(
        self,
        id: str,
        past: SessionHistory,
        *,
        epoch: int,
        store: Log,
        spawn: Spawn,
        listener: OutcomeListener,
        pool: Pool | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        redactor: Redactor | None = None,
    ) -> None:
        self.id = id
        self.counters = Counters()
        self.turn_times = TurnTimes()
        self.pid: int | None = None
        self.recorder = Recorder()
        self.last_in: float | None = None
        self.last_out: float | None = None
        # When the stop of the process began; None if no process is being stopped.
        self.stopping_since: float | None = None
        self.timers: dict[Subject, asyncio.TimerHandle] = {}
        self.error: BaseException | None = None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.state: Session = replace(_since(past.session, self.now()), kept=kept(past))
        self._dispatcher = Dispatcher(self._handle)
        self.spawn = spawn
        self._pool = Pool() if pool is None else pool
        self._process: AgentProcess | None = None
        self.frame_bytes_max = frame_bytes_max
        self._frames = FrameReader(self)
        self._redactor = redactor
        self._log_writer = LogWriter(store, id, past, epoch=epoch, hears=self, redactor=redactor)
        self._is_paused = False
        # Requested start that waits for a slot in the pool or for the log.
        self._postponed: StartProcess | None = None
        self._place = PoolSlot.NONE
        self._mute: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"<Driver {self.id} {self.state.mode.name} "
            f"process={self.state.process.phase.name} pid={self.pid}>"
        )

    @property
    def epoch(self) -> int:
        return self._log_writer.epoch

    def now(self) -> float:
        return self._loop.time()

    # -- dispatch ---------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Process a fact, and the facts that its effects cause, to the end."""
        try:
            self._dispatcher.dispatch(fact)
        except Exception as exc:
            self.fail(exc)
        except BaseException as exc:
            # A KeyboardInterrupt in the middle leaves effects half performed, and the driver cannot
            # tell which ones. So the session fails.
            self.fail(exc)
            raise

    def _handle(self, fact: Fact) -> None:
        if self.error is not None:
            return
        self.recorder.note(self.state, fact)
        self.state, effects = core.step(self.state, fact)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append():
                self._append(effect)
            case WriteFrame(data=data):
                assert self._process is not None
                self.counters.frames_out += 1
                self.counters.bytes_out += len(data)
                self.last_out = self.now()
                self._process.write(data)
            case StartTimer(at=at, subject=subject):
                self._cancel_timer(subject)
                self.timers[subject] = self._loop.call_at(at, self._on_timer, subject)
            case CancelTimer(subject=subject):
                self._cancel_timer(subject)
            case StartProcess():
                self._postponed = effect
                self._place = PoolSlot.WANTED
                self._pool.want(self)
            case ReportReady():
                self._pool.has_started(self)
            case ReportIdle():
                self._pool.look()
            case HoldConversation(conversation=conversation):
                self._hold_conversation(conversation)
            case StopProcess():
                self._stop_process()
            case SweepTools(since=since, ends=ends):
                assert self._process is not None
                self._process.sweep_tools(since, ends)
            case Finish():
                self._finish()
            case _:
                tell(self._listener, effect)

    # -- the log ----------------------------------------------------------------------------------
    def _append(self, effect: Append) -> None:
        self.turn_times.note(effect.entries, self.now())
        self._log_writer.append(effect.entries)
        if self._log_writer.is_behind:
            self._stop_reading()

    def on_committed(self, seq: int) -> None:
        self.dispatch(Committed(self.now(), seq))

    def on_append_failed(self, error: StoreError | NotOwner) -> None:
        log.error("session %s: cannot write the log: %s", self.id, error)
        self.dispatch(AppendFailed(self.now(), error, is_final=isinstance(error, NotOwner)))

    def lose(self, error: NotOwner, kill_by: float) -> None:
        """End the session on this host, because it has lost the ownership.

        The order matters. First all callers get their answers, then the process is stopped. KILL
        comes by `kill_by` at the latest, because after that another host may start a process for
        the session.
        """
        log.error("session %s: ownership lost, stopping its process: %s", self.id, error)
        self.dispatch(AppendFailed(self.now(), error, is_final=True))
        self.dispatch(CloseAsked(self.now()))
        if self._process is not None:
            self._let_read()
            self._process.stop(kill_by)

    def on_answered(self) -> None:
        if self._is_paused and self._log_writer.has_caught_up:
            self._let_read()

    def _let_read(self) -> None:
        # Never while frames wait in the backlog: its end calls `on_caught_up`.
        if self._is_paused and self._process is not None and not self._frames.is_behind:
            self._is_paused = False
            self._process.resume()

    def _stop_reading(self) -> None:
        if not self._is_paused and self._process is not None:
            self._is_paused = True
            self._process.pause()

    def on_backlog(self) -> None:
        self._stop_reading()

    def on_caught_up(self) -> None:
        if self._log_writer.has_caught_up or self.is_leaving:
            self._let_read()

    def _hold_conversation(self, conversation: str | None) -> None:
        number = self.state.process.number

        def on_taken(error: NotOwner) -> None:
            self.dispatch(
                ConversationTaken(self.now(), number, error, self._log_writer.conversation)
            )

        self._log_writer.lease(conversation, on_taken)

    # -- the pool ---------------------------------------------------------------------------------
    @property
    def urgency(self) -> int:
        seconds = self.state.config.ageing_seconds
        return max(
            (ask_queue.standing(waiting, self.now(), seconds) for waiting in self.state.queue),
            default=0,
        )

    @property
    def idle_since(self) -> float | None:
        return self.state.idle_since

    @property
    def is_leaving(self) -> bool:
        return self.state.process.phase is ProcessPhase.STOPPING

    @property
    def waits_to_start(self) -> bool:
        """Whether a process was requested and not started yet."""
        return self._postponed is not None

    @property
    def waits_for_place(self) -> bool:
        return self._place is PoolSlot.WANTED

    def evict(self) -> None:
        self.dispatch(EvictAsked(self.now()))

    def start_now(self) -> None:
        """Start the process after the pool has granted a slot.

        Before the start the log must confirm that this host still owns the session and the lease of
        the conversation that the process resumes.
        """
        self._place = PoolSlot.GIVEN
        effect = self._postponed
        assert effect is not None
        # The lease may have been lost, or never taken, while the log was broken.
        self._hold_conversation(self.state.conversation)
        self._log_writer.advance(partial(self._on_advanced, effect))

    # -- the process ------------------------------------------------------------------------------
    def _on_advanced(self, effect: StartProcess) -> None:
        if self._postponed is not effect:
            return  # The start was cancelled meanwhile.
        self._postponed = None
        try:
            self._start_process(effect)
        except Exception as exc:
            # This callback runs outside `dispatch`, so an exception must fail the session here.
            self.fail(exc)

    def _stop_process(self) -> None:
        if self._postponed is not None:
            number = self._postponed.process
            self._forget_start()
            self._report(number, ProcessGone())
            return
        assert self._process is not None
        self.stopping_since = self.stopping_since or self.now()
        # A process that is blocked on a full pipe cannot react to a signal, so reading resumes.
        self._let_read()
        self._process.stop()

    def _forget_start(self) -> None:
        """Cancel a start that waits for a slot in the pool or for the log."""
        self._postponed = None
        if self._place is PoolSlot.WANTED:
            self._place = PoolSlot.NONE
            self._pool.withdraw(self)
        else:
            self._leave_pool()

    def _start_process(self, effect: StartProcess) -> None:
        assert self._process is None
        number = effect.process
        self._frames.begin(self.frame_bytes_max)
        self._is_paused = False
        self.counters.processes += 1
        try:
            # The start may have waited, and a setting may have changed since.
            effect = replace(effect, settings=self.state.settings)
            self._process = self.spawn(effect, partial(self._on_report, number))
        except BanksmanError as exc:
            self._leave_pool()
            self._report(number, StartFailed(exc))

    def _leave_pool(self) -> None:
        if self._place is PoolSlot.GIVEN:
            self._place = PoolSlot.NONE
            self._pool.has_left(self)

    def _on_report(self, number: int, report: AgentReport) -> None:
        if isinstance(report, BytesRead):
            self.last_in = self.now()
            self.counters.bytes_in += len(report.data)
            self._frames.feed(number, report.data)
            return
        if isinstance(report, Exited):
            self._frames.note_exit()
        # An event of the process must not overtake output that still waits in the backlog.
        # `FrameWritten` is exempt: it only permits the next write and has no order relative to the
        # output.
        if self._frames.is_behind and not isinstance(report, FrameWritten):
            self._frames.after(partial(self._hear, number, report))
        else:
            self._hear(number, report)

    def _hear(self, number: int, report: StreamEnded | Report) -> None:
        match report:
            case StreamEnded():
                self._on_output_end(number)
                return
            case Started(pid=pid):
                self.pid = pid
            case Exited():
                self._cancel_mute()
            case StartFailed():
                self._forget_process()
            case ProcessGone(swept=swept, survivors=survivors, stderr=stderr):
                self.counters.swept += len(swept)
                self.counters.survivors += len(survivors)
                self._forget_process()
                report = dataclasses.replace(report, stderr=redacted(stderr, self._redactor))
            case SweepEnded(swept=swept):
                self.counters.swept += len(swept)
            case FrameWritten() | WriteFailed():
                pass
            case _:
                assert_never(report)
        self._report(number, report)

    def _report(self, number: int, report: Report) -> None:
        self.dispatch(ProcessReported(self.now(), number, report, self.epoch))

    def _on_output_end(self, number: int) -> None:
        self._frames.end(number)
        # After the exit, only other processes of its tree hold stdout open. They do not count as
        # mute.
        if self.state.process.exit is None:
            self._mute = self._loop.call_later(MUTE_SECONDS_MAX, self._on_mute, number)

    def _on_mute(self, number: int) -> None:
        # The exit may already have happened. In that case `look_now` reports it, and the report
        # cancels the timer.
        if self._process is not None:
            self._process.look_now()
        if self._mute is not None:
            self._mute = None
            hint = "its process is stopped, because no more output can arrive"
            error = AgentError("the agent closed its stdout and did not exit", hint=hint)
            self._report(number, WriteFailed(error))

    def _cancel_mute(self) -> None:
        """The agent exits, so it is not mute."""
        if self._mute is not None:
            self._mute.cancel()
            self._mute = None

    def _forget_process(self) -> None:
        self._cancel_mute()
        self._process = None
        self.pid = self.stopping_since = None
        self._leave_pool()
        if self.error is not None:
            self._finish()

    # -- timers -----------------------------------------------------------------------------------
    def _cancel_timer(self, subject: Subject) -> None:
        timer = self.timers.pop(subject, None)
        if timer is not None:
            timer.cancel()

    def _on_timer(self, subject: Subject) -> None:
        # The timer may run late, behind a busy loop, while the agent's answer waits in the pipe.
        # Events that have already happened must be processed before a conclusion is drawn from
        # their absence. So the pipe is read first, and the timer fires behind the frames that were
        # read.
        timer = self.timers.get(subject)
        if self._process is not None:
            self._process.look_now()
        self._frames.after(partial(self._fire, subject, timer))

    def _fire(self, subject: Subject, timer: asyncio.TimerHandle | None) -> None:
        # The frames that were just read may have cancelled or restarted the timer. Then this timer
        # is stale.
        if timer is not None and self.timers.get(subject) is timer:
            del self.timers[subject]
            self.dispatch(TimerFired(self.now(), subject))

    # -- the end ----------------------------------------------------------------------------------
    def _finish(self) -> None:
        for subject in list(self.timers):
            self._cancel_timer(subject)
        self._frames.close()
        self._log_writer.release()
        self._listener.finish()

    def fail(self, exc: BaseException) -> None:
        """Fail the session because of a bug in Banksman.

        All callers get the error, and the process is stopped. The session is finished only when the
        process is gone (`_forget_process`), so that its log is not released while the process still
        runs.
        """
        message = "session %s failed: bug in Banksman; last facts:\n%s"
        log.error(message, self.id, self.recorder, exc_info=exc)
        self.error = exc
        self._dispatcher.clear()
        self._frames.clear()
        if self._postponed is not None:
            self._forget_start()
        for subject in list(self.timers):
            self._cancel_timer(subject)
        self._listener.fail(self.bug())
        if self._process is not None:
            self._let_read()
            self._process.stop()
        else:
            self._leave_pool()  # The slot was granted, but no process was started.
            self._finish()

    def abandon(self) -> None:
        """Drop the session because its event loop is closed.

        Nothing can be reported after that. The keeper ends the process.
        """
        if self._process is not None:
            self._process.abandon()

    def bug(self) -> BugError:
        message = f"session {self.id} failed because of a bug in Banksman: {self.error!r}"
        return BugError(message, hint="please report it")


def _since(state: Session, now: float) -> Session:
    """Restart the waiting times of queued asks at `now`.

    The log's times come from another clock, so the time that an ask has already waited is unknown.
    """
    queue = tuple(
        replace(waiting, ask=replace(waiting.ask, at=now))
        if isinstance(waiting, Turn) and waiting.ask
        else waiting
        for waiting in state.queue
    )
    return replace(state, queue=queue)
