"""Driver of a session: feeds facts to the state machine and performs the effects.

`dispatch(fact)` processes one fact at a time, to the end, without suspending. The driver owns the
state, the process (`agent_process.py`) and the timers. It passes each fact to the pure core and
performs the returned effects in order. It decides only about backpressure. Effects for callers go
to `outcome_listener.py`, and log entries to `log_writer.py`. Other threads must use the loop's
`call_soon_threadsafe`.

A bug in Banksman (an assert, an unexpected exception) fails only this session. The error is logged
with the recorder's facts, the process is ended and the callers get an error. Other sessions are not
affected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.meaning import Meaning
from banksman.core.process_facts import ProcessGone, Report, StartFailed, SweepEnded
from banksman.core.session import ask_queue, plain_frames
from banksman.core.session import step as core
from banksman.core.session.effects import (
    Append,
    CancelTimer,
    ClaimBudget,
    Effect,
    Finish,
    HoldConversation,
    ReportIdle,
    ReportLimit,
    ReportReady,
    StartProcess,
    StartTimer,
    StopProcess,
    SweepTools,
    WaitUntil,
    WriteFrame,
)
from banksman.core.session.facts import (
    AppendFailed,
    CloseAsked,
    Committed,
    ConversationTaken,
    EvictAsked,
    Fact,
    FramesRead,
    ProcessReported,
    Subject,
    TimerFired,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.questions import kept
from banksman.core.session.state import ProcessPhase, ProcessState, Session, Store
from banksman.core.session.usage_events import without_repeats
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.core.wire.redaction import Redactor
from banksman.dispatcher import Dispatcher
from banksman.errors import BanksmanError, BugError, NotOwner, StoreError
from banksman.sessions.accounts import SessionAccounts
from banksman.sessions.agent_process import DrivenProcess, Spawn
from banksman.sessions.budgets import HostBudgets
from banksman.sessions.diagnostics import Counters, Recorder, TurnTimes, UsageCount
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener, tell
from banksman.sessions.pool import Pool
from banksman.store.log import Log

log = logging.getLogger("banksman")

# Frames without a meaning are counted in after this many: the recorder has a line for each.
PLAIN_FRAMES_MAX = 256
# Interval at which a wait for a wall clock time looks at that clock. The event loop's clock stands
# still while the machine is suspended, and does not follow a wall clock that is set.
WALL_SECONDS_MAX = 60.0


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
        accounts: SessionAccounts | None = None,
        budgets: HostBudgets | None = None,
    ) -> None:
        self.id = id
        self.counters = Counters()
        self.turn_times = TurnTimes()
        self.usage = UsageCount()
        self.recorder = Recorder()
        self.last_in: float | None = None
        self.last_out: float | None = None
        self.timers: dict[Subject, asyncio.TimerHandle] = {}
        self.error: BaseException | None = None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        queue = ask_queue.restart_waits(past.session.queue, self.now(), time.time())
        # The state without the last plain frames, which `state` adds.
        self._state: Session = replace(past.session, queue=queue, kept=kept(past))
        self._plain_frames = 0
        self._plain_at = 0.0
        self._dispatcher = Dispatcher(self._handle)
        self.spawn = spawn
        self._pool = Pool() if pool is None else pool
        self._process: DrivenProcess | None = None
        self.frame_bytes_max = frame_bytes_max
        self._frames = FrameReader(self)
        self._redactor = redactor
        self._accounts = accounts
        self._log_writer = LogWriter(store, id, past, epoch=epoch, hears=self, redactor=redactor)
        # A commit that the state machine has not received yet; 0 if it has received all.
        self._committed = 0
        # Requested start that waits for a slot in the pool or for the log.
        self._postponed: StartProcess | None = None
        # The budgets that the sessions of the host share.
        self._budgets = budgets
        if budgets is not None:
            budgets.join(self)

    def __repr__(self) -> str:
        return (
            f"<Driver {self.id} {self.state.mode.name} "
            f"process={self.state.process.phase.name} pid={self.pid}>"
        )

    @property
    def epoch(self) -> int:
        return self._log_writer.epoch

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def stopping_since(self) -> float | None:
        """When the stop of the process began; None if no process is being stopped."""
        return None if self._process is None else self._process.stopping_since

    def now(self) -> float:
        return self._loop.time()

    # -- dispatch ---------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Process a fact, and the facts that its effects cause, to the end."""
        self._run(self._dispatcher.dispatch, fact)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function. If it raises, the session fails."""
        try:
            function(*args)
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
        self._count_plain_frames()
        if self._committed:
            self._step(Committed(fact.at, self._committed))
        self._step(fact)

    def _step(self, fact: Fact) -> None:
        if isinstance(fact, Committed):
            self._committed = 0
        self.recorder.note(self._state, fact)
        self._state, effects = core.step(self._state, fact)
        for effect in effects:
            self._perform(effect)

    @property
    def state(self) -> Session:
        """The state of the session after all that was read. Notes the plain frames before it."""
        self._count_plain_frames()
        return self._state

    def _count_plain_frames(self) -> None:
        frames, self._plain_frames = self._plain_frames, 0
        if frames:
            state, at = self._state, self._plain_at
            self.recorder.note(state, FramesRead(at, state.process.number, [b""] * frames, []))
            self._state = plain_frames.count_frames(state, frames, at)

    # -- frames -----------------------------------------------------------------------------------
    @property
    def process_state(self) -> ProcessState:
        return self._state.process

    @property
    def dialect(self) -> Dialect:
        return self._state.config.dialect

    def on_frames(
        self, process: int, lines: Sequence[bytes], meanings: Sequence[tuple[int, Meaning]]
    ) -> None:
        # Every token takes this path. A frame that changes nothing in the state machine needs no
        # fact, no effect and no new state.
        if meanings or self._dispatcher.is_handling or self.error is not None:
            self.dispatch(FramesRead(self.now(), process, lines, meanings))
        else:
            self._run(self._on_plain_frames, process, lines)

    def _on_plain_frames(self, process: int, lines: Sequence[bytes]) -> None:
        """Append frames without a meaning, unless they need a step."""
        entries = plain_frames.plain_entries(self._state, process, lines)
        if entries is None:
            self._dispatcher.dispatch(FramesRead(self.now(), process, lines, ()))
            return
        self._log_writer.append_frames(entries)
        self._plain_frames += len(lines)
        self._plain_at = self.now()
        if self._plain_frames >= PLAIN_FRAMES_MAX:
            self._count_plain_frames()
        if self._log_writer.is_behind:
            self.on_backlog()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append(entries=entries):
                self.turn_times.note(entries, self.now())
                fresh = without_repeats(entries)
                self.usage.note(fresh)
                self._log_writer.append(entries)
                if self._budgets is not None:
                    self._budgets.note(self, self._state, fresh)
                if self._log_writer.is_behind:
                    self.on_backlog()
            case WriteFrame(data=data):
                assert self._process is not None
                self.counters.frames_out += 1
                self.counters.bytes_out += len(data)
                self.last_out = self.now()
                self._process.agent.write(data)
            case StartTimer(at=at, subject=subject):
                self._cancel_timer(subject)
                self.timers[subject] = self._loop.call_at(at, self._on_timer, subject)
            case CancelTimer(subject=subject):
                self._cancel_timer(subject)
            case StartProcess():
                self._postponed = effect
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
                self._process.agent.sweep_tools(since, ends)
            case Finish():
                self._finish()
            case WaitUntil() | ReportLimit() | ClaimBudget():
                self._use_shared(effect)
            case _:
                tell(self._listener, effect)

    def _use_shared(self, effect: WaitUntil | ReportLimit | ClaimBudget) -> None:
        """Perform an effect on what sessions of the host share: an account or a budget."""
        match effect:
            case WaitUntil(wall=wall, subject=subject, agent=agent, seconds_min=seconds_min):
                jitter = 0.0 if self._accounts is None else self._accounts.jitter(agent, wall)
                self._wait_until(subject, wall + jitter, seconds_min)
            case ReportLimit(until=until, agent=agent):
                if self._accounts is not None:
                    self._accounts.report(agent, until)
            case ClaimBudget(key=key, caller=caller):
                assert self._budgets is not None
                self._budgets.claim(self, key, caller)

    # -- the log ----------------------------------------------------------------------------------
    def on_committed(self, seq: int) -> None:
        # If nothing waits for this commit, the state machine only notes its number. It needs the
        # number for other facts, so the driver keeps it until the next one. Nearly every commit is
        # one of frames that nobody waits for.
        if self._state.deferred or self._state.store is not Store.WORKING:
            self.dispatch(Committed(self.now(), seq))
        else:
            self._committed = seq

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
            self._process.stop(kill_by)

    def on_answered(self) -> None:
        if self._process is not None and self._log_writer.has_caught_up:
            self._process.resume()

    def on_backlog(self) -> None:
        if self._process is not None:
            self._process.pause()

    def on_caught_up(self) -> None:
        if self._process is not None and (self._log_writer.has_caught_up or self.is_leaving):
            self._process.resume()

    def _hold_conversation(self, conversation: str | None) -> None:
        number = self.state.process.number

        def on_taken(error: NotOwner) -> None:
            self.dispatch(
                ConversationTaken(self.now(), number, error, self._log_writer.conversation)
            )

        self._log_writer.lease(self.dialect.name, conversation, on_taken)

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
        return self._pool.is_waiting(self)

    def evict(self) -> None:
        self.dispatch(EvictAsked(self.now()))

    def start_now(self) -> None:
        """Start the process after the pool has granted a slot.

        Before the start the log must confirm that this host still owns the session and the lease of
        the conversation that the process resumes.
        """
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
            # The start waits for a slot in the pool, or for the log.
            number, self._postponed = self._postponed.process, None
            self._pool.leave(self)
            self._report(number, ProcessGone())
            return
        assert self._process is not None
        self._process.stop()

    def _start_process(self, effect: StartProcess) -> None:
        assert self._process is None
        self._frames.begin(self.frame_bytes_max)
        self.counters.processes += 1
        try:
            # The start may have waited, and a setting may have changed since.
            effect = replace(effect, settings=self.state.settings)
            self._process = DrivenProcess(
                effect, self.spawn, self._frames, self._on_report, self._redactor
            )
        except BanksmanError as exc:
            self._pool.leave(self)
            self._report(effect.process, StartFailed(exc))

    def _on_report(self, number: int, report: Report) -> None:
        if isinstance(report, ProcessGone | SweepEnded):
            self.counters.swept += len(report.swept)
        if isinstance(report, ProcessGone):
            self.counters.survivors += len(report.survivors)
        if isinstance(report, ProcessGone | StartFailed):
            self._process = None
            self._pool.leave(self)
            if self.error is not None:
                self._finish()
        self._report(number, report)

    def _report(self, number: int, report: Report) -> None:
        self.dispatch(ProcessReported(self.now(), number, report, self.epoch))

    # -- timers -----------------------------------------------------------------------------------
    def _cancel_timer(self, subject: Subject) -> None:
        timer = self.timers.pop(subject, None)
        if timer is not None:
            timer.cancel()

    def _wait_until(self, subject: Subject, due: float, seconds_min: float = 0.0) -> None:
        """Start a timer that fires once the wall clock has passed `due`.

        If it has passed already, the timer fires after `seconds_min`.
        """
        self._cancel_timer(subject)
        left = due - time.time()
        seconds = min(left, WALL_SECONDS_MAX) if left > 0.0 else seconds_min
        self.timers[subject] = self._loop.call_later(seconds, self._on_wall_timer, subject, due)

    def _on_wall_timer(self, subject: Subject, due: float) -> None:
        if time.time() < due:
            self._wait_until(subject, due)
        else:
            self._on_timer(subject)

    def _on_timer(self, subject: Subject) -> None:
        # The timer may run late, behind a busy loop, while the agent's answer waits in the pipe.
        # Events that have already happened must be processed before a conclusion is drawn from
        # their absence. So the pipe is read first, and the timer fires behind the frames that were
        # read.
        timer = self.timers.get(subject)
        if self._process is not None:
            self._process.agent.look_now()
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
        if self._budgets is not None:
            self._budgets.leave(self)
        self._log_writer.release()
        self._listener.finish()

    def fail(self, exc: BaseException) -> None:
        """Fail the session because of a bug in Banksman.

        All callers get the error, and the process is stopped. The session is finished only when the
        process is gone (`_on_report`), so that its log is not released while the process still
        runs.
        """
        self._count_plain_frames()
        message = "session %s failed: bug in Banksman; last facts:\n%s"
        log.error(message, self.id, self.recorder, exc_info=exc)
        self.error = exc
        self._dispatcher.clear()
        self._frames.clear()
        for subject in list(self.timers):
            self._cancel_timer(subject)
        self._listener.fail(self.bug())
        if self._process is not None:
            self._process.stop()
        else:
            self._postponed = None
            self._pool.leave(self)
            self._finish()

    def abandon(self) -> None:
        """Drop the session because its event loop is closed.

        Nothing can be reported after that. The keeper ends the process.
        """
        if self._process is not None:
            self._process.agent.abandon()

    def bug(self) -> BugError:
        message = f"session {self.id} failed because of a bug in Banksman: {self.error!r}"
        return BugError(message, hint="please report it")
