"""Keep the record of a session current, so that its process survives the death of this host.

`CrashJournal` belongs to a driver and to one process. It does three things in a fixed order:

1. Before an append: add the moment that follows the append to the record (`crash_record.py`).
2. After the commit: settle the output that the durable events were made from. Until then its bytes
   stay in the spool of the process (`process/spool.py`).
3. A frame for the agent waits until everything logged before it is durable. So no agent has read
   a frame that the log does not have. It also waits until the keeper holds the process. So a host
   that dies before that has written no prompt, and the next host asks it again.

If the record cannot be written, the session goes on, and its process does not survive this host:
its keeper is told so. A keeper without a record would hold the tree, and no host could claim it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from banksman.core.session.effects import (
    CancelTimer,
    Effect,
    StartTimer,
    WaitUntil,
    WriteFrame,
)
from banksman.core.session.facts import Subject
from banksman.core.session.state import Session, Store
from banksman.core.wire.framing import Framing
from banksman.errors import BanksmanError, MachineError
from banksman.process.tree_hand_over import Survival
from banksman.sessions import held_session
from banksman.sessions.agent_process import AgentProcess
from banksman.sessions.crash_record import FORMAT, Beginning, Header, Moment, RecordFile, TimerDues
from banksman.sessions.log_writer import LogWriter
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.session_timers import SessionTimers

log = logging.getLogger("banksman")

SECRET_BYTES = 32
_OF_TIMERS = StartTimer | CancelTimer | WaitUntil


class JournalDriver(Protocol):
    """Interface of the driver that a journal uses."""

    id: str

    @property
    def uncounted(self) -> tuple[Session, int, float]:
        """The state without the last plain frames, their number, and the time of the last one."""
        ...


class CrashJournal:
    """Journal of one process that survives its host.

    `process`: its number. `begins`: where this host begins with it.
    """

    def __init__(  # noqa: PLR0917  The parts of the driver.
        self,
        driver: JournalDriver,
        process: int,
        listener: OutcomeListener,
        log_writer: LogWriter,
        timers: SessionTimers,
        hold_seconds: float,
        begins: Beginning,
    ) -> None:
        self._driver = driver
        self._number = process
        self._listener = listener
        self._log_writer = log_writer
        self._timers = timers
        self._record = begins.record
        # The moments whose events may not be durable, behind the one that certainly is.
        self._last = last = begins.last
        self._moments: deque[Moment] = deque(() if last is None else (last,))
        self._offset = begins.offset
        self._line = bytearray(begins.line)
        self._is_readable = True
        self._finished = begins.finished
        self._writing = None if last is None else last.writing
        # A frame that waits for the commit of this seq.
        self._waiting: tuple[int, bytes] | None = None
        self._agent: AgentProcess | None = None
        # The end of the process waits for the commit of this seq.
        self._end_at: int | None = None
        # Why no host can continue the process any more.
        self._lost = ""
        self._is_over = False
        # Whether the keeper was asked to hold the process, and has not answered.
        self._is_asked = False
        secret = os.urandom(SECRET_BYTES)
        self.survival = Survival(hold_seconds, secret, self._on_named, self._on_answered)

    def _on_named(self, name: str) -> None:
        self._is_asked = True
        header = Header(
            format=FORMAT,
            store=self._log_writer.store_identity,
            session=self._driver.id,
            secret=self.survival.secret,
            clock=held_session.clock(),
            process=self._number,
            seconds=self.survival.hold_seconds,
        )
        self._record = RecordFile(name, header)
        # Of a process that was handed over. The first moment of any other comes with its start.
        if self._driver.uncounted[0].process.is_there:
            self.note()
        if not self._is_recorded:
            raise MachineError("cannot survive a crash of this host: its state cannot be recorded")

    def _on_answered(self) -> None:
        self._is_asked = False
        self._write_now()

    @property
    def _is_recorded(self) -> bool:
        return self._record is not None

    @property
    def offset(self) -> int:
        """The bytes of stdout that were read."""
        return self._offset

    def drive(self, agent: AgentProcess) -> None:
        """Set the process."""
        self._agent = agent

    # -- moments ----------------------------------------------------------------------------------
    def note(self, head: int | None = None) -> None:
        """Add the present moment to the record. `head`: the seq of the log that it follows."""
        if self._record is None:
            return
        moment = self._moment(head)
        if _is_same(moment, self._last):
            return
        self._last = moment
        self._moments.append(moment)
        try:
            self._record.add(moment)
            if self._record.is_large:
                self._record.rewrite(tuple(self._moments))
        except BanksmanError as exc:
            log.error("session %s: its process ends with this host: %s", self._driver.id, exc)
            # In this order: see `release`.
            if self._agent is not None:
                self._agent.forgo_survival()
            self.give_up()

    def _moment(self, head: int | None) -> Moment:
        state, frames, at = self._driver.uncounted
        last = self._last
        timers, walls, turns = self._parts(last, state)
        return Moment(
            head=state.head + frames if head is None else head,
            state=state,
            frames=frames,
            at=at if frames else 0.0,
            offset=self._offset,
            line=self._line,
            line_bytes=len(self._line),
            timers=timers,
            walls=walls,
            turns=turns,
            redaction=self._log_writer.redaction,
            finished=self._finished,
            writing=self._writing,
            lost=self._obstacle(state),
        )

    def _parts(
        self, last: Moment | None, state: Session
    ) -> tuple[TimerDues, TimerDues, Mapping[str, int]]:
        """Return the timers and the places of the turns. They change with the state alone."""
        if last is not None and last.state is state:
            return last.timers, last.walls, last.turns
        return (
            plain_dues(self._timers.dues),
            plain_dues(self._timers.walls),
            self._listener.turns_after(),
        )

    def _obstacle(self, state: Session) -> str:
        if state.store is not Store.WORKING:
            self._lost = "the log has failed"
        elif not self._is_readable:
            return "its output is in the middle of a frame that is too large"
        elif state.callbacks:
            return "its agent calls this host"
        return self._lost or self._listener.obstacle()

    # -- output -----------------------------------------------------------------------------------
    def on_read(self, data: bytes) -> None:
        """These bytes were read, and their lines are about to be passed on."""
        self._offset += len(data)
        if not self._is_readable:
            return
        *lines, rest = data.rsplit(b"\n", 1)
        if lines:
            # Moments refer to the old buffer.
            self._line = bytearray(rest)
        else:
            self._line += rest

    def after_read(self, framing: Framing) -> None:
        """Their lines were passed on, and logged with a moment if there were any."""
        if framing.is_oversize is self._is_readable:
            self._is_readable = not framing.is_oversize
            # `on_read` has left out the bytes behind the end of the oversize frame.
            self._line = bytearray(framing.partial or b"")
        self.note()
        self._settle()

    def on_end(self) -> None:
        """The output has ended, and its last line is about to be passed on."""
        self._line = bytearray()

    # -- frames for the agent ---------------------------------------------------------------------
    def before(self, effects: Sequence[Effect]) -> list[Effect]:
        """Prepare for the effects of a step, and return them in the order to perform them."""
        # The moment has the timers of its step, and it comes with the append.
        ordered = sorted(effects, key=lambda effect: not isinstance(effect, _OF_TIMERS))
        for effect in ordered:
            if isinstance(effect, WriteFrame):
                self._writing = effect.data
        return ordered

    def write(self, data: bytes) -> None:
        """Write a frame once everything before it is durable, and the keeper holds the process."""
        self.note()
        self._writing = data
        self._waiting = (self._driver.uncounted[0].head, data)
        self._write_now()

    def _write_now(self) -> None:
        if self._waiting is None or self._is_asked:
            return
        if self._waiting[0] <= self._log_writer.durable_head:
            data, self._waiting = self._waiting[1], None
            assert self._agent is not None
            self._agent.write(data)

    def on_written(self) -> None:
        """The agent's pipe has taken the frame."""
        self._finished += 1
        self._writing = None

    def on_stop(self) -> None:
        """The process is about to be stopped: no frame follows."""
        if self._waiting is not None:
            self._waiting = self._writing = None
        self.note()

    # -- the log ----------------------------------------------------------------------------------
    def on_committed(self) -> None:
        """Settle what has become durable, and write the frame that waited for it."""
        self._settle()
        self._write_now()
        if self._end_at is not None and self._end_at <= self._log_writer.durable_head:
            self.release()

    def _settle(self) -> None:
        durable, moments = self._log_writer.durable_head, self._moments
        while len(moments) > 1 and moments[1].head <= durable:
            moments.popleft()
        if self._agent is None:
            return
        if self._record is None:
            self._agent.settle()  # No host comes after this one.
        elif moments and moments[0].head <= durable:
            self._agent.settle(moments[0].offset)

    # -- the end ----------------------------------------------------------------------------------
    def end(self) -> None:
        """Release the process, which is gone, once its end is durable."""
        self._waiting = None
        self._end_at = self._log_writer.head
        self.on_committed()

    def lose(self, reason: str) -> None:
        """Let no host continue the process from now on, although its keeper holds it."""
        self._lost = reason
        self.note()

    @property
    def is_over(self) -> bool:
        """Whether the process is released."""
        return self._is_over

    def release(self) -> None:
        """Release the process now. Its guards end, and so does what is left of it."""
        # In this order: a keeper without a record would wait for the end of its hold.
        if self._agent is not None:
            self._agent.release()
        self._is_over = True
        self.give_up()

    def begin_again(self) -> None:
        """Prepare for another keeper's hold of the same process, with a record of its own."""
        self.give_up()
        self._last = None

    def give_up(self) -> None:
        """Remove the record. No host can continue the process from now on."""
        record, self._record = self._record, None
        if record is not None:
            record.remove()


def _is_same(moment: Moment, last: Moment | None) -> bool:
    """Compare two moments, and their states by identity: those of a long queue take time."""
    return (
        last is not None
        and moment.state is last.state
        and moment._replace(state=last.state, line=b"") == last._replace(line=b"")
        and moment.line is last.line
    )


def plain_dues(dues: Mapping[Subject, float]) -> TimerDues:
    """Return timers as plain values."""
    return tuple((timer.value, name, at) for (timer, name), at in dues.items())
