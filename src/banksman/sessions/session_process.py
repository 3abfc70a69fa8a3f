"""Process of a session: its place in the pool, its start, its reports and its crash journal.

A session has one process after another. `SessionProcess` performs the effects of the state machine
on the current one, and reports its changes to the driver as facts. A start takes three steps:

1. Wait for a place in the pool (`pool.py`).
2. Wait until the log confirms that this host still owns the session, and has the lease of the
   conversation that the process resumes.
3. Start the process (`agent_process.py`).

A process that is to survive this host has a journal (`crash_journal.py`). It is released when the
log has the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from banksman.core.process_facts import (
    FrameWritten,
    ProcessGone,
    Report,
    StartFailed,
    Stderr,
    SweepEnded,
)
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import ask_queue
from banksman.core.session.effects import (
    Effect,
    HoldConversation,
    ReportIdle,
    ReportReady,
    StartProcess,
    StopProcess,
    SweepTools,
    WriteFrame,
)
from banksman.core.session.facts import ConversationTaken, EvictAsked, Fact, ProcessReported
from banksman.core.session.state import ProcessPhase, Session
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.errors import BanksmanError, NotOwner, Refused
from banksman.process.adoption import Claimed
from banksman.process.tree_hand_over import Survival
from banksman.sessions.agent_process import (
    AgentProcess,
    Continue,
    DrivenProcess,
    OnReport,
    Spawn,
)
from banksman.sessions.crash_journal import CrashJournal
from banksman.sessions.crash_record import Beginning
from banksman.sessions.diagnostics import Counters
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.held_session import Adopted
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.pool import Pool
from banksman.sessions.session_timers import SessionTimers

# Effects on the process, and on its place in the pool.
ProcessEffect = (
    StartProcess
    | ReportReady
    | ReportIdle
    | HoldConversation
    | WriteFrame
    | StopProcess
    | SweepTools
)


class ProcessDriver(Protocol):
    """Interface of the driver that its process uses."""

    id: str
    counters: Counters
    # When the last frame was written.
    last_out: float | None

    @property
    def state(self) -> Session: ...
    @property
    def uncounted(self) -> tuple[Session, int, float]:
        """The state without the last plain frames, their number, and the time of the last one."""
        ...

    @property
    def epoch(self) -> int: ...
    def now(self) -> float: ...
    def dispatch(self, fact: Fact) -> None: ...
    def fail(self, exc: BaseException) -> None: ...
    def on_process_gone(self) -> None:
        """The process has ended, or was not started. The report follows."""
        ...


def _refuse(claimed: Claimed, on_report: OnReport) -> AgentProcess:
    del claimed, on_report
    raise Refused("this session continues no process")


class SessionProcess:
    """The current process of one session, or the wait for it. A member of the pool."""

    def __init__(
        self,
        driver: ProcessDriver,
        *,
        spawn: Spawn,
        pool: Pool,
        listener: OutcomeListener,
        log_writer: LogWriter,
        frames: FrameReader,
        timers: SessionTimers,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        redactor: Redactor | None = None,
    ) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self.spawn = spawn
        # For how long the next process survives this host; None: it does not. Set by the registry,
        # as the following one.
        self.survive_seconds: Callable[[], float | None] = lambda: None
        # Continues a claimed process.
        self.continue_claimed: Callable[[Claimed, OnReport], AgentProcess] = _refuse
        self._pool = pool
        self._listener = listener
        self._log_writer = log_writer
        self._frames = frames
        self._timers = timers
        self.frame_bytes_max = frame_bytes_max
        self._redactor = redactor
        # The process; None: there is none.
        self.driven: DrivenProcess | None = None
        # Requested start that waits for a place in the pool or for the log.
        self._postponed: StartProcess | None = None
        # The journal of the process that survives, and those whose end is not durable yet.
        self.journal: CrashJournal | None = None
        # Whether there has ever been one.
        self.has_journals = False
        self._ending: list[CrashJournal] = []

    # -- state ------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        return None if self.driven is None else self.driven.pid

    def stderr(self) -> Stderr:
        """Return what the process has written to stderr; nothing without a process."""
        return Stderr() if self.driven is None else self.driven.stderr()

    @property
    def stopping_since(self) -> float | None:
        """When the stop of the process began; None if no process is being stopped."""
        return None if self.driven is None else self.driven.stopping_since

    @property
    def survival(self) -> Survival | None:
        """How the next process survives this host; None if it does not."""
        if self.journal is None or self.survive_seconds() is None:
            return None
        return self.journal.survival

    # -- effects ----------------------------------------------------------------------------------
    def before(self, effects: list[Effect]) -> list[Effect]:
        """Return the effects of a step in the order to perform them."""
        return effects if self.journal is None else self.journal.before(effects)

    def perform(self, effect: ProcessEffect) -> None:
        match effect:
            case WriteFrame(data=data):
                self._write(data)
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
                self._stop()
            case SweepTools(since=since, ends=ends):
                assert self.driven is not None
                if self.journal is not None:
                    self.journal.note()
                self.driven.agent.sweep_tools(since, ends)

    def _write(self, data: bytes) -> None:
        assert self.driven is not None
        driver = self._driver
        driver.counters.frames_out += 1
        driver.counters.bytes_out += len(data)
        driver.last_out = driver.now()
        if self.journal is None:
            self.driven.agent.write(data)
        else:
            self.journal.write(data)

    def _stop(self) -> None:
        if self._postponed is not None:
            # The start waits for a place in the pool, or for the log.
            number, self._postponed = self._postponed.process, None
            self._pool.leave(self)
            self._report(number, ProcessGone())
            return
        assert self.driven is not None
        if self.journal is not None:
            self.journal.on_stop()
        self.driven.stop()

    # -- the pool ---------------------------------------------------------------------------------
    @property
    def urgency(self) -> int:
        state, now = self._driver.state, self._driver.now()
        seconds = state.config.ageing_seconds
        return max(
            (ask_queue.standing(waiting, now, seconds) for waiting in state.queue), default=0
        )

    @property
    def idle_since(self) -> float | None:
        return self._driver.state.idle_since

    @property
    def is_leaving(self) -> bool:
        return self._driver.state.process.phase is ProcessPhase.STOPPING

    @property
    def waits_to_start(self) -> bool:
        """Whether a process was requested and not started yet."""
        return self._postponed is not None

    @property
    def waits_for_place(self) -> bool:
        return self._pool.is_waiting(self)

    def evict(self) -> None:
        self._driver.dispatch(EvictAsked(self._driver.now()))

    def start_now(self) -> None:
        """Start the process after the pool has granted a place, once the log has confirmed it."""
        effect = self._postponed
        assert effect is not None
        # The lease may have been lost, or never taken, while the log was broken.
        self._hold_conversation(self._driver.state.conversation)
        self._log_writer.advance(partial(self._on_advanced, effect))

    # -- the start --------------------------------------------------------------------------------
    def _hold_conversation(self, conversation: str | None) -> None:
        driver, writer = self._driver, self._log_writer
        state = driver.state
        number = state.process.number

        def on_taken(error: NotOwner) -> None:
            driver.dispatch(ConversationTaken(driver.now(), number, error, writer.conversation))

        writer.lease(state.config.dialect.name, conversation, on_taken)

    def _on_advanced(self, effect: StartProcess) -> None:
        if self._postponed is not effect:
            return  # The start was cancelled meanwhile.
        self._postponed = None
        try:
            self._start(effect)
        except Exception as exc:
            # This callback runs outside `dispatch`, so an exception must fail the session here.
            self._driver.fail(exc)

    def _start(self, effect: StartProcess) -> None:
        self._driver.counters.processes += 1
        # The start may have waited, and a setting may have changed since.
        effect = replace(effect, settings=self._driver.state.settings)
        if (seconds := self.survive_seconds()) is not None:
            self._keep_journal(effect.process, seconds, Beginning())
        self._begin(effect.process, partial(self.spawn, effect))

    def _begin(self, number: int, begin: Continue, partial_line: bytes = b"") -> None:
        assert self.driven is None
        self._frames.begin(self.frame_bytes_max, partial_line, self.journal)
        try:
            self.driven = DrivenProcess(
                number, begin, self._frames, self._on_report, self._redactor
            )
        except BanksmanError as exc:
            self._pool.leave(self)
            self._end_journal_soon()
            self._report(number, StartFailed(exc))
        else:
            if self.journal is not None:
                self.journal.drive(self.driven.agent)

    def adopt(self, adopted: Adopted, begin: Continue) -> bool:
        """Continue a process that another host has started. False: that has failed."""
        number = self._driver.state.process.number
        self._pool.adopt(self)
        if adopted.begins is not None:
            # Also if it does not survive this host: its spool is bounded, so it must be settled.
            self._keep_journal(number, self.survive_seconds() or 0.0, adopted.begins)
        self._begin(number, begin, adopted.held.partial)
        if self.driven is None:
            return False
        self.driven.pid = adopted.claimed.pid
        return True

    def finish_write(self, adopted: Adopted) -> None:
        """Note or write the frame that the former host had begun to write."""
        if adopted.is_written:
            self._on_report(self._driver.state.process.number, FrameWritten())
        elif adopted.unsent is not None and self.journal is not None:
            self.journal.write(adopted.unsent)

    # -- reports ----------------------------------------------------------------------------------
    def _on_report(self, number: int, report: Report) -> None:
        counters = self._driver.counters
        if isinstance(report, ProcessGone | SweepEnded):
            counters.swept += len(report.swept)
        if isinstance(report, ProcessGone):
            counters.survivors += len(report.survivors)
        if isinstance(report, ProcessGone | StartFailed):
            self.driven = None
            self._pool.leave(self)
            self._driver.on_process_gone()
            # After the step about this report, which is a moment of the journal.
            self._end_journal_soon()
        if isinstance(report, FrameWritten) and self.journal is not None:
            self.journal.on_written()
        self._report(number, report)

    def lose(self, number: int) -> None:
        """Note that a process has no host any more, so that nothing more is heard of it."""
        self._on_report(number, ProcessGone())

    def _report(self, number: int, report: Report) -> None:
        driver = self._driver
        driver.dispatch(ProcessReported(driver.now(), number, report, driver.epoch))

    def look(self) -> None:
        """Read and report everything that has already happened."""
        if self.driven is not None:
            self.driven.agent.look_now()

    # -- backpressure -----------------------------------------------------------------------------
    def pause(self) -> None:
        """Stop reading the output, because the log or the frames are behind."""
        if self.driven is not None:
            self.driven.pause()

    def resume(self, *, drains: bool = False) -> None:
        """Read again, if the log has caught up. `drains`: also if it has not, before an end."""
        driven = self.driven
        if driven is None or not driven.is_paused:
            return
        if self._log_writer.has_caught_up or (drains and self.is_leaving):
            driven.resume()

    # -- the journal ------------------------------------------------------------------------------
    def _keep_journal(self, number: int, seconds: float, begins: Beginning) -> None:
        self.has_journals = True
        self._log_writer.on_append = self._on_append
        self.journal = CrashJournal(
            self._driver, number, self._listener, self._log_writer, self._timers, seconds, begins
        )

    def _on_append(self, seq: int) -> None:
        """The log is about to get entries up to this seq."""
        if self.journal is not None:
            self.journal.note(seq)

    def on_committed(self) -> None:
        """The log has made more entries durable."""
        if self.journal is not None:
            self.journal.on_committed()
        for journal in self._ending[:]:
            journal.on_committed()
            if journal.is_over:
                self._ending.remove(journal)

    def _end_journal_soon(self) -> None:
        """Release the process that is gone, once the log has its end.

        Not before the step about that end, which is a moment of the journal.
        """
        if self.journal is not None:
            self._loop.call_soon(self._end_journal, self.journal)

    def _end_journal(self, journal: CrashJournal) -> None:
        if self.journal is journal:
            self.journal = None
        journal.end()
        if not journal.is_over:
            self._ending.append(journal)

    # -- the end ----------------------------------------------------------------------------------
    def end(self, kill_by: float | None = None) -> None:
        """Stop the process without a step of the state machine: see `AgentProcess.stop`."""
        if self.driven is not None:
            self.driven.stop(kill_by)

    def drop(self) -> None:
        """Give up the place, and the start or the process that the next host has."""
        self.driven = self._postponed = None
        self._pool.leave(self)

    def release_journals(self) -> None:
        for journal in (self.journal, *self._ending):
            if journal is not None:
                journal.release()

    def abandon(self) -> None:
        """Stop reporting, because the event loop is closed. The keeper ends the process."""
        if self.driven is not None:
            self.driven.agent.abandon()
