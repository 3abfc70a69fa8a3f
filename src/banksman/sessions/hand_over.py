"""Hand the process of a session over to the next host, and continue such a process there.

`HandingOver` performs the effect `HandOver` of one driver:

1. Stop reading outside of a frame that is too large for the log, and handle everything that was
   read.
2. Hold all facts back but those of the log: the state stands still. Wait until the log has
   everything: a host that is killed from here on must not leave a record that is ahead of its log.
3. Write the record (`held_session.py`), and give the process to its keeper.
4. Log `session.handed_over`.
5. Once that is durable, release the session, and answer the facts that were held back: their
   callers must turn to the next host.

If a step before the log fails, this host keeps the process. If the log fails, it claims the
process back like a next host, and ends it as after any failure of the log.

`continued_effects` is for the other end: a driver that begins in the middle of a turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from banksman.core.process_facts import Stream
from banksman.core.session import live_state
from banksman.core.session.effects import AskHuman, ClaimBudget, StopProcess, SweepTools
from banksman.core.session.facts import (
    AppendFailed,
    BudgetChanged,
    BudgetClaimed,
    BudgetWarned,
    Fact,
    FramesRead,
    HandedOver,
    HandOverFailed,
    ProcessReported,
    Subject,
    Timer,
    TimerFired,
)
from banksman.core.session.hand_over import may_hand_over
from banksman.core.session.state import ProcessPhase, ProcessState, Session
from banksman.errors import BanksmanError, Refused
from banksman.process import adoption, hold_record
from banksman.sessions import held_session
from banksman.sessions.crash_journal import plain_dues
from banksman.sessions.crash_record import TimerDues
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.held_session import Adopted, HeldSession
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.session_process import SessionProcess
from banksman.sessions.session_timers import SessionTimers

log = logging.getLogger("banksman")

SECRET_BYTES = 32
# Facts that need no answer after the process has left.
_PAST = TimerFired | ProcessReported | FramesRead | BudgetChanged | BudgetWarned | BudgetClaimed
# Timers of the departure from the old host.
_OF_THE_OLD_HOST = (Timer.LEAVE, Timer.BACKGROUND)


class HandOverDriver(Protocol):
    """Interface of the driver that a hand-over uses."""

    id: str
    error: BaseException | None
    hold_seconds: float
    handing: HandingOver | None

    @property
    def state(self) -> Session: ...
    @property
    def process_state(self) -> ProcessState: ...
    def now(self) -> float: ...
    def run(self, function: Callable[..., None], *args: Any) -> None: ...
    def dispatch(self, fact: Fact) -> None: ...
    def handle(self, fact: Fact) -> None:
        """Process a fact that a hand-over does not hold back."""
        ...

    def fail(self, exc: BaseException) -> None: ...


class HandingOver:
    """One hand-over of a driver's process."""

    def __init__(  # noqa: PLR0917  The parts of the driver.
        self,
        driver: HandOverDriver,
        process: SessionProcess,
        listener: OutcomeListener,
        log_writer: LogWriter,
        frames: FrameReader,
        timers: SessionTimers,
    ) -> None:
        assert process.driven is not None
        self._driver = driver
        self._session_process = process
        self._process = process.driven
        # Of a process that survives this host.
        self._journal = process.journal
        self._listener = listener
        self._log_writer = log_writer
        self._frames = frames
        self._timers = timers
        self._number = driver.process_state.number
        self._secret = os.urandom(SECRET_BYTES)
        # Facts that wait for the result. None: they are not held back yet.
        self._facts: list[Fact] | None = None
        self._failure: AppendFailed | None = None
        # Waits for the log, before the record is written.
        self._is_waiting = False
        # The name of the hold, once the keeper has the process.
        self._hold: str | None = None
        # Refers to the task, which the event loop does not.
        self._task: asyncio.Task[None] | None = None

    @property
    def has_given(self) -> bool:
        """Whether the keeper has the process."""
        return self._hold is not None

    def takes(self, fact: Fact) -> bool:
        """Hold a fact back, if the state stands still."""
        if self._facts is None:
            return False
        self._facts.append(fact)
        return True

    # -- to the keeper ----------------------------------------------------------------------------
    def begin(self) -> None:
        """Stop reading. The rest follows outside of the dispatch that asks for it."""
        if self._frames.is_oversize:
            # The file with its beginning ends with this host. The deadline bounds the wait.
            self._frames.after_oversize(partial(self._driver.run, self._begin_again))
            return
        self._process.hold()
        later = partial(self._frames.after, partial(self._driver.run, self._request))
        asyncio.get_running_loop().call_soon(later)

    def _begin_again(self) -> None:
        driver = self._driver
        if driver.error is not None:
            return
        if may_hand_over(driver.state):
            self.begin()
        else:
            self._give_up(is_final=False)

    def _request(self) -> None:
        driver = self._driver
        if driver.error is not None:
            return
        if self._frames.is_behind:
            # A report or a timer came behind the last output. No output follows.
            self._frames.after(partial(driver.run, self._request))
            return
        if self._frames.is_oversize:
            # It has begun in the last output. The state machine asks again.
            self._give_up(is_final=False)
            return
        self._is_waiting = True
        self.on_committed()

    def on_committed(self) -> None:
        """Go on if the log has everything by now."""
        if not self._is_waiting or self._log_writer.durable_head != self._log_writer.head:
            return
        self._is_waiting = False
        if not may_hand_over(self._driver.state):
            # A frame, a timer or a caller wanted something meanwhile. The state machine asks again.
            self._give_up(is_final=False)
            return
        self._facts = []
        self._give()

    def _give(self) -> None:
        driver = self._driver
        try:
            record = held_session.encode(self._record(), self._log_writer.store_identity)
            handed = self._process.agent.hand_over(driver.hold_seconds, self._secret, record)
        except (BanksmanError, TypeError, ValueError) as exc:
            self._fail(exc)
            return
        handed.add_done_callback(partial(driver.run, self._on_answer))

    def _on_answer(self, handed: asyncio.Future[str]) -> None:
        error = None if handed.cancelled() else handed.exception()
        if handed.cancelled() or error is not None:
            self._fail(error)
            return
        self._hold = name = handed.result()
        if self._failure is not None:
            self._claim_back()
            return
        seconds = self._driver.hold_seconds
        about = {
            "hold": name,
            "host": os.getpid(),
            "seconds": seconds,
            "until": time.time() + seconds,
        }
        self._driver.handle(HandedOver(self._driver.now(), self._number, about))

    def _record(self) -> HeldSession:
        """Build the record of the session. `Refused`: it has something that only this host has."""
        driver = self._driver
        state, partial_line = driver.state, self._frames.partial
        if partial_line is None:
            raise Refused("its output has ended")
        if obstacle := self._listener.obstacle():
            raise Refused(obstacle)
        return HeldSession(
            secret=self._secret,
            session=driver.id,
            head=state.head,
            clock=held_session.clock(),
            state=live_state.encode(live_state.frozen(state)),
            partial=partial_line,
            timers=plain_dues(self._timers.dues),
            walls=plain_dues(self._timers.walls),
            turns=self._listener.turns_after(),
            redaction=self._log_writer.redaction,
            offset=None if self._journal is None else self._journal.offset,
        )

    # -- the result -------------------------------------------------------------------------------
    def finish(self) -> None:
        """Answer the callers whose facts waited: the next host has the session."""
        self._facts = [fact for fact in self._facts or () if not isinstance(fact, _PAST)]
        self._release()

    def on_append_failed(self, fact: AppendFailed) -> None:
        """Get the process back before the state machine hears of a failed append, and stops it."""
        self._failure = self._failure or fact
        if self._is_waiting:
            self._is_waiting = False
            self._fail(fact.error)
        elif self._hold is not None and self._task is None:
            self._claim_back()
        elif self._facts is None:
            self._deliver_failure()

    def _fail(self, error: BaseException | None) -> None:
        log.warning(
            "session %s: cannot hand over its process, so it leaves: %s", self._driver.id, error
        )
        self._give_up(is_final=True)

    def _give_up(self, *, is_final: bool) -> None:
        """Go on with the process."""
        driver = self._driver
        driver.handing = None
        self._process.release()
        # The failed append first: what the state machine logs for the other fact rests on it.
        self._deliver_failure()
        driver.handle(HandOverFailed(driver.now(), self._number, is_final))
        self._release()

    def _deliver_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._driver.handle(failure)

    def _release(self) -> None:
        facts, self._facts = self._facts, None
        for fact in facts or ():
            self._driver.dispatch(fact)

    def _claim_back(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._claimed_back())

    async def _claimed_back(self) -> None:
        """Claim the process back, because the log does not tell the next host of it."""
        assert self._hold is not None
        driver = self._driver
        hold_record.remove(self._hold)
        is_back = True
        try:
            claimed = await adoption.claim(self._hold, self._secret, argv=(b"agent",))
            if self._journal is not None:
                self._journal.begin_again()
                claimed.offsets = {Stream.STDOUT: self._journal.offset}
            self._process.take_back(partial(self._session_process.continue_claimed, claimed))
            if self._journal is not None:
                self._journal.drive(self._process.agent)
        except BanksmanError as exc:
            log.error("session %s: its process is lost: %s", driver.id, exc)
            is_back = False
        except Exception as exc:
            driver.fail(exc)  # A bug. This task runs outside `dispatch`.
            return
        self._hold = None
        self._give_up(is_final=True)
        if not is_back:
            self._session_process.lose(self._number)


# -- the next host ---------------------------------------------------------------------------------
def continued_effects(
    state: Session, adopted: Adopted, timers: SessionTimers
) -> list[AskHuman | ClaimBudget]:
    """Restart the timers of a process that was handed over, and return what else must be done."""
    for subject, at in _dues(adopted.held.timers):
        timers.start(subject, at)
    for subject, at in _dues(adopted.held.walls):
        timers.wait_until(subject, at)
    # `Begun` shows the question about the budget, which needs no process.
    effects: list[AskHuman | ClaimBudget] = [
        AskHuman(question.id, question.asked, question.turn) for question in state.questions
    ]
    turn = state.turn
    if turn is not None and turn.ask is not None and state.config.shares_budget:
        effects.append(ClaimBudget(turn.key, turn.ask.caller))
    return effects


def unfinished_effects(state: Session) -> list[StopProcess | SweepTools]:
    """Return what a host that was killed may have begun: a stop, or a sweep."""
    process = state.process
    if process.was_told_to_stop:
        return [StopProcess(process.number)]
    if process.sweeps and process.phase is ProcessPhase.READY:
        since = process.sweeps[0][1]
        return [SweepTools(process.number, since, state.config.after_interrupt == "sweep")]
    return []


def _dues(timers: TimerDues) -> list[tuple[Subject, float]]:
    found = [((Timer(kind), name), at) for kind, name, at in timers]
    return [pair for pair in found if pair[0][0] not in _OF_THE_OLD_HOST]
