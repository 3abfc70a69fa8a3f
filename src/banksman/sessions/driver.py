"""Driver of a session: feeds facts to the state machine and performs the effects.

`dispatch(fact)` processes one fact at a time, to the end, without suspending. The driver owns the
state. It passes each fact to the pure core, and performs the returned effects in order or passes
them on: those on the process to `session_process.py`, those for callers to `outcome_listener.py`,
log entries to `log_writer.py`, and timers to `session_timers.py`. It decides only about
backpressure. Other threads must use the loop's `call_soon_threadsafe`.

A bug in Banksman (an assert, an unexpected exception) fails only this session. The error is logged
with the recorder's facts, the process is ended and the callers get an error. Other sessions are not
affected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.meaning import Meaning
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import ask_queue, budget_gate, durability, plain_frames
from banksman.core.session import step as core
from banksman.core.session.effects import (
    Append,
    CancelTimer,
    ClaimBudget,
    Effect,
    Finish,
    HandOver,
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
    Fact,
    FramesRead,
    Subject,
    TimerFired,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.questions import kept
from banksman.core.session.state import Mode, ProcessState, Session, Store
from banksman.core.session.usage import additions, without_repeats
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.dispatcher import Dispatcher
from banksman.errors import BugError, NotOwner, StoreError
from banksman.sessions.accounts import SessionAccounts
from banksman.sessions.agent_process import Continue, Spawn
from banksman.sessions.budgets import HostBudgets
from banksman.sessions.diagnostics import Counters, Recorder, TurnTimes, UsageCount
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.hand_over import HandingOver, continued_effects, unfinished_effects
from banksman.sessions.held_session import Adopted
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener, tell
from banksman.sessions.pool import Pool
from banksman.sessions.session_process import SessionProcess
from banksman.sessions.session_timers import SessionTimers
from banksman.store.log import Log

log = logging.getLogger("banksman")

# Frames without a meaning are counted in after this many: the recorder has a line for each.
PLAIN_FRAMES_MAX = 256


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
        adopted: Adopted | None = None,
    ) -> None:
        self.id = id
        self.counters = Counters()
        self.turn_times = TurnTimes()
        self.usage = UsageCount()
        self.recorder = Recorder()
        self.last_in: float | None = None
        self.last_out: float | None = None
        self.error: BaseException | None = None
        # Called when the session is closed and no process of it is left, with the function that
        # releases the session. Set by the registry.
        self.on_closed: Callable[[Callable[[], None]], None] | None = None
        self._is_released = False
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        # The state without the last plain frames, which `state` adds.
        self._state: Session = (
            self._after_restart(past) if adopted is None else adopted.behind(past)
        )
        self._plain_frames = 0
        self._plain_at = 0.0
        # The label of plain frames, and the state that it belongs to.
        self._label: plain_frames.FrameLabel | None = None
        self._labelled: Session | None = None
        self._dispatcher = Dispatcher(self._handle)
        self._frames = FrameReader(self)
        self._timers = SessionTimers(self._look_first, self._fire)
        self._log_writer = LogWriter(store, id, past, epoch=epoch, hears=self, redactor=redactor)
        # A commit that the state machine has not received yet; 0 if it has received all.
        self._committed = 0
        self.process = SessionProcess(
            self,
            spawn=spawn,
            pool=Pool() if pool is None else pool,
            listener=listener,
            log_writer=self._log_writer,
            frames=self._frames,
            timers=self._timers,
            frame_bytes_max=frame_bytes_max,
            redactor=redactor,
        )
        # How long a keeper holds the process for the next host, and the hand-over in progress.
        self.hold_seconds = 0.0
        self.handing: HandingOver | None = None
        self._accounts = accounts
        # The budgets that the sessions of the host share.
        self._budgets = budgets
        if budgets is not None:
            budgets.join(self)

    def __repr__(self) -> str:
        return (
            f"<Driver {self.id} {self.state.mode.name} "
            f"process={self.state.process.phase.name} pid={self.process.pid}>"
        )

    def _after_restart(self, past: SessionHistory) -> Session:
        queue = ask_queue.restart_waits(past.session.queue, self.now(), time.time())
        return replace(
            past.session, queue=queue, kept=kept(past), budget_question=budget_gate.kept(past)
        )

    @property
    def epoch(self) -> int:
        return self._log_writer.epoch

    def now(self) -> float:
        return self._loop.time()

    # -- dispatch ---------------------------------------------------------------------------------
    def dispatch(self, fact: Fact) -> None:
        """Process a fact, and the facts that its effects cause, to the end."""
        if self.handing is None or not self.handing.takes(fact):
            self.run(self._dispatcher.dispatch, fact)

    def run(self, function: Callable[..., None], *args: Any) -> None:
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
        if self._plain_frames:
            self._count_plain_frames()
        if self._committed:
            # Nothing waited for these commits, so they change only the number.
            seq, self._committed = self._committed, 0
            self.recorder.note(self._state, Committed(fact.at, seq))
            self._state = durability.count(self._state, seq)
        self.recorder.note(self._state, fact)
        self._state, effects = core.step(self._state, fact)
        for effect in self.process.before(effects):
            self._perform(effect)

    @property
    def uncounted(self) -> tuple[Session, int, float]:
        """The state without the last plain frames, their number, and the time of the last one."""
        return self._state, self._plain_frames, self._plain_at

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
            self.run(self._on_plain_frames, process, lines)

    def _on_plain_frames(self, process: int, lines: Sequence[bytes]) -> None:
        """Append frames without a meaning, unless they need a step."""
        # A state never changes, and it stays the same from token to token.
        if self._labelled is not self._state:
            self._labelled, self._label = self._state, plain_frames.label_of(self._state)
        label = self._label
        # A process that was replaced is not heard.
        if label is None or label.process != process:
            self._dispatcher.dispatch(FramesRead(self.now(), process, lines, ()))
            return
        entries = label.entries(lines)
        # Before the append: a host that is killed after it must know the frames.
        self._plain_frames += len(lines)
        self._plain_at = self._loop.time()
        if self.turn_times.awaits_output:
            self.turn_times.note(entries, self._plain_at, self.dialect)
        self._log_writer.append_frames(entries)
        if self._plain_frames >= PLAIN_FRAMES_MAX:
            self._count_plain_frames()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append(entries=entries):
                self.turn_times.note(entries, self.now(), self.dialect)
                added = additions(without_repeats(entries))
                self.usage.note(added)
                self._log_writer.append(entries)
                if self._budgets is not None:
                    self._budgets.note(self, self._state, added)
            case StartTimer(at=at, subject=subject):
                self._timers.start(subject, at)
            case CancelTimer(subject=subject):
                self._timers.cancel(subject)
            case (
                WriteFrame()
                | StartProcess()
                | ReportReady()
                | ReportIdle()
                | HoldConversation()
                | StopProcess()
                | SweepTools()
            ):
                self.process.perform(effect)
            case HandOver():
                self._hand_over()
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
                self._timers.wait_until(subject, wall + jitter, seconds_min)
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
        # one of frames that nobody waits for. A hand-over records the state after all commits.
        is_waited_for = self._state.deferred or self.handing is not None
        if is_waited_for or self._state.store is not Store.WORKING:
            self.handle(Committed(self.now(), seq))
        else:
            self._committed = seq
        if self.process.has_journals:
            self.process.on_committed()
        if self.handing is not None:
            self.handing.on_committed()

    def on_append_failed(self, error: StoreError | NotOwner) -> None:
        log.error("session %s: cannot write the log: %s", self.id, error)
        fact = AppendFailed(self.now(), error, is_final=isinstance(error, NotOwner))
        if self.handing is None:
            self.dispatch(fact)
        else:
            self.handing.on_append_failed(fact)

    def lose(self, error: NotOwner, kill_by: float) -> None:
        """End the session on this host, because it has lost the ownership.

        The order matters. First all callers get their answers, then the process is stopped. KILL
        comes by `kill_by` at the latest, because after that another host may start a process for
        the session.
        """
        log.error("session %s: ownership lost, stopping its process: %s", self.id, error)
        self.dispatch(AppendFailed(self.now(), error, is_final=True))
        self.dispatch(CloseAsked(self.now()))
        self.process.end(kill_by)

    def on_answered(self) -> None:
        self.process.resume()

    def on_backlog(self) -> None:
        self.process.pause()

    def on_caught_up(self) -> None:
        self.process.resume(drains=True)

    # -- timers -----------------------------------------------------------------------------------
    @property
    def timers(self) -> dict[Subject, float]:
        """The running timers by their subjects, and when they are due."""
        return self._timers.running

    def _look_first(self, then: Callable[[], None]) -> None:
        self.process.look()
        self._frames.after(then)

    def _fire(self, subject: Subject) -> None:
        self.dispatch(TimerFired(self.now(), subject))

    # -- hand-over --------------------------------------------------------------------------------
    def _hand_over(self) -> None:
        self.handing = HandingOver(
            self, self.process, self._listener, self._log_writer, self._frames, self._timers
        )
        self.handing.begin()

    def adopt(self, adopted: Adopted, begin: Continue) -> None:
        """Continue a process that another host has started."""
        self._log_writer.remember_redaction(adopted.held.redaction)
        for effect in continued_effects(self.state, adopted, self._timers):
            self._perform(effect)
        if self.process.adopt(adopted, begin):
            self._finish_effects(adopted)

    def _finish_effects(self, adopted: Adopted) -> None:
        """Do what the former host has decided and not done."""
        if self.state.deferred:
            self.dispatch(Committed(self.now(), self.state.head))
        for effect in unfinished_effects(self.state):
            self._perform(effect)
        self.process.finish_write(adopted)

    def handle(self, fact: Fact) -> None:
        """Process a fact that a hand-over does not hold back."""
        self.run(self._dispatcher.dispatch, fact)

    # -- the end ----------------------------------------------------------------------------------
    def _finish(self) -> None:
        self._timers.cancel_all()
        self.process.release_journals()
        if self.handing is not None:
            # The next host has the process.
            self.process.drop()
        self._frames.close()
        if self._budgets is not None:
            self._budgets.leave(self)
        is_ours = self.error is None and self._state.store is not Store.LOST
        if self.on_closed is not None and is_ours and self._state.mode is Mode.CLOSED:
            self.on_closed(self._release)
        else:
            self._release()

    def _release(self) -> None:
        # A session that fails during its close is released at once.
        if self._is_released:
            return
        self._is_released = True
        self._log_writer.release()
        self._listener.finish()
        if self.handing is not None:
            self.handing.finish()

    def fail(self, exc: BaseException) -> None:
        """Fail the session because of a bug in Banksman.

        All callers get the error, and the process is stopped. The session is finished only when the
        process is gone (`on_process_gone`), so that its log is not released while the process still
        runs.
        """
        self._count_plain_frames()
        message = "session %s failed: bug in Banksman; last facts:\n%s"
        log.error(message, self.id, self.recorder, exc_info=exc)
        self.error = exc
        if self.process.journal is not None:
            self.process.journal.lose("its host has failed")
        self._dispatcher.clear()
        self._frames.clear()
        self._timers.cancel_all()
        self._listener.fail(self.bug())
        has_given = self.handing is not None and self.handing.has_given
        if self.process.driven is not None and not has_given:
            self.process.end()
        else:
            self.process.drop()
            self._finish()

    def on_process_gone(self) -> None:
        if self.error is not None:
            self._finish()

    def bug(self) -> BugError:
        message = f"session {self.id} failed because of a bug in Banksman: {self.error!r}"
        return BugError(message, hint="please report it")
