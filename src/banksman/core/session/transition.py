"""One step in the making: the state so far, and the effects so far. It lives inside a call of `step` and no longer.

This is where the log and the pipe are kept in order. Entries of one step are one append, before all other effects. What
must not be done before the log has it is deferred; when the store is broken there is nothing to wait for, and it is
done at once, marked as not durable. Frames leave one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import ProtocolOutput, ProtocolState
from banksman.core.dialects.meaning import Meaning, TurnOver
from banksman.core.session import event as kinds
from banksman.core.session import watchdogs
from banksman.core.session.effects import (
    Append,
    CancelTimer,
    Effect,
    Finish,
    GiveReceipt,
    LeaveInLog,
    Resolve,
    SettingTaken,
    StartProcess,
    StartTimer,
    StopProcess,
    TellAnswer,
    WriteFrame,
)
from banksman.core.session.event import Entry, entry
from banksman.core.session.facts import Timer
from banksman.core.session.state import KEEPING, Deferred, Mode, ProcessPhase, ProcessState, Session, Stdin, Store
from banksman.core.session.turn import Cause, Move, Turn, TurnPhase
from banksman.errors import AgentError, BanksmanError, UsageError

# Frames that wait for the pipe: a few interrupts and answers. More are an agent that asks and asks, and never reads.
OUTBOX_FRAMES_MAX = 1024


class Transition:
    __slots__ = ("at", "effects", "entries", "heard", "state")

    def __init__(self, state: Session, at: float) -> None:
        self.state = state
        self.at = at
        self.effects: list[Effect] = []
        self.entries: list[Entry] = []
        # What the words that were sent have meant already, to be heard when this fact is done with.
        self.heard: list[Meaning] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def set_process(self, **changes: Any) -> None:
        self.state = replace(self.state, process=replace(self.state.process, **changes))

    def set_turn(self, turn: Turn) -> None:
        """Put a turn back where it is: ours, or the agent's own."""
        if turn.is_own:
            assert self.state.own is not None
            self.set(own=turn)
        else:
            assert self.state.turn is not None
            self.set(turn=turn)

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def start_timer(self, seconds: float, timer: Timer, subject: str) -> None:
        self.do(StartTimer(self.at + seconds, (timer, subject)))

    def cancel_timer(self, timer: Timer, subject: str) -> None:
        self.do(CancelTimer((timer, subject)))

    @property
    def speaker(self) -> str | None:
        """The turn that what is said now belongs to, and what is answered to it."""
        speaking = self.state.speaking
        return None if speaking is None else speaking.id

    # -- the log -----------------------------------------------------------------------------------------------------
    def log(self, turn: str | None, kind: str, /, **body: object) -> None:
        if self.state.store is Store.WORKING:
            self.entries.append(entry(turn, kind, **body))
        elif kind == kinds.TURN_ENDED:
            # Each ask has one ending, so this is bounded by the asks that were open when the store broke.
            self.set(unwritten=(*self.state.unwritten, entry(turn, kind, **body)))

    def after_commit(self, deferred: Deferred) -> None:
        """Once everything logged so far is durable."""
        state = self.state
        if state.store is not Store.WORKING:
            self.do_undurably(deferred)
            return
        self.set(deferred=(*state.deferred, (state.head + len(self.entries), deferred)))

    def do_undurably(self, deferred: Deferred) -> None:
        match deferred:
            case Resolve(turn=turn, outcome=outcome):
                self.do(Resolve(turn, dataclasses.replace(outcome, durable=False)))
            case GiveReceipt() | Finish() | SettingTaken():
                self.do(deferred)
            case TellAnswer():
                self.do(replace(deferred, error=self.state.store_error))
            case LeaveInLog():
                raise AssertionError("whoever waited has an end when the log fails")
            case _:
                pass  # Nothing is accepted, and nothing is sent, without a log.

    def done(self) -> tuple[Session, list[Effect]]:
        if self.entries:
            self.set(head=self.state.head + len(self.entries))
            self.effects.insert(0, Append(tuple(self.entries)))
        return self.state, self.effects

    # -- the process -------------------------------------------------------------------------------------------------
    def start_process(self, schema: Mapping[str, Any] | None) -> None:
        state = self.state
        assert state.process.phase is ProcessPhase.NONE
        number = state.process.number + 1
        conversation = state.conversation or state.fork_of
        forks = conversation is not None and state.conversation is None
        starting = ProcessPhase.STARTING
        self.set(process=ProcessState(number=number, phase=starting, resumes=conversation, forks=forks, schema=schema))
        # Its clock runs from the moment it is there: it may have to wait for its place.
        self.do(StartProcess(number, conversation, forks, state.settings))

    def stop_process(self, error: BanksmanError | None = None) -> None:
        """Walk the ladder. What the process still says is heard, and its end is what ends an open turn."""
        process = self.state.process
        if process.phase is ProcessPhase.NONE or process.was_told_to_stop:
            return
        self.set_process(phase=ProcessPhase.STOPPING, was_told_to_stop=True, outbox=(), error=process.error or error)
        self.do(StopProcess(process.number))

    def give_up_process(self, error: BanksmanError) -> None:
        """It cannot be used any more. Its turn fails for this reason, unless it was to end for another anyway."""
        for turn in (self.state.turn, self.state.own):
            if turn is not None and turn.phase is TurnPhase.RUNNING:
                self.set_turn(replace(turn.moved(Move.STOP), cause=Cause.REPLACE))
        self.stop_process(error)

    def speak(
        self, turn: str | None, say: Callable[[ProtocolState], ProtocolOutput], unsaid: Meaning | None = None
    ) -> None:
        """Say something to the agent, in its own words, if there is one that was spoken to. `unsaid`: what it means if
        it cannot be said after all. All that callers say is checked before it comes in here, but each by itself."""
        protocol = self.state.process.protocol
        if protocol is not None:
            try:
                output = say(protocol)
            except UsageError as exc:
                if unsaid is None:
                    raise
                self.heard.append(replace(unsaid, error=str(exc)) if isinstance(unsaid, TurnOver) else unsaid)
                return
            self.set_process(protocol=output.protocol)
            for frame in output.frames:
                self.send(turn, frame)
            self.heard += output.meanings

    def send(self, turn: str | None, data: bytes) -> None:
        """One whole frame to the agent, in its turn. To a process that is on its way out nothing is sent."""
        process = self.state.process
        if process.phase not in (ProcessPhase.STARTING, ProcessPhase.READY) or process.stdin is Stdin.BROKEN:
            return
        if self.state.store is Store.WORKING:
            self.entries.append((turn, kinds.SENT, data.rstrip(b"\n")))
        if process.stdin is Stdin.FREE:
            self._write(data)
        elif len(process.outbox) >= OUTBOX_FRAMES_MAX:
            self.break_stdin(AgentError(f"the agent does not take its stdin: {OUTBOX_FRAMES_MAX} frames wait for it"))
        else:
            self.set_process(outbox=(*process.outbox, data))

    def send_next(self) -> None:
        """The pipe has taken a frame whole: the next one may begin."""
        process = self.state.process
        if process.stdin is not Stdin.BUSY:
            return
        self.cancel_timer(Timer.WRITE, f"{process.number}.{process.frames_sent}")
        self.set_process(stdin=Stdin.FREE)
        if process.outbox:
            self.set_process(outbox=process.outbox[1:])
            self._write(process.outbox[0])

    def break_stdin(self, error: BanksmanError) -> None:
        """A frame may have been cut. Nothing is ever written after it, so the process has to go."""
        self.set_process(stdin=Stdin.BROKEN, outbox=())
        self.give_up_process(error)

    def _write(self, data: bytes) -> None:
        process = self.state.process
        assert process.stdin is Stdin.FREE
        count = process.frames_sent + 1
        self.set_process(stdin=Stdin.BUSY, frames_sent=count)
        self.do(WriteFrame(process.number, data))
        self.start_timer(self.state.config.write_seconds, Timer.WRITE, f"{process.number}.{count}")

    # -- clocks and holds --------------------------------------------------------------------------------------------
    def attend_clocks(self) -> None:
        """A question or a tool came or went: some clocks stand still, others go on."""
        ours = self.state.turn
        turn = ours if ours is not None and ours.is_open else self.state.own
        if turn is not None and turn.phase is TurnPhase.RUNNING:
            has_question = any(question.turn == turn.id for question in self.state.questions)
            has_tool = bool(turn.tools)
            self.set(clocks=watchdogs.attend(self.state.clocks, self.at, has_tool=has_tool, has_question=has_question))
            self.arm_clocks(turn)

    def arm_clocks(self, turn: Turn) -> None:
        """One timer for all clocks of a turn; it looks again when it fires."""
        due = watchdogs.next_at(self.state.clocks)
        if due is not None and turn.phase is TurnPhase.RUNNING:
            self.do(StartTimer(due, (Timer.CLOCKS, turn.key)))

    def watch_hold(self) -> None:
        """The hold is in use: its idle time begins anew, and the timer of the time before is stale."""
        hold = self.state.hold
        assert hold is not None
        count = self.state.hold_asks + 1
        self.cancel_timer(Timer.HOLD, f"{hold.id}#{count - 1}")
        self.set(hold_asks=count)
        self.start_timer(self.state.config.hold_idle_seconds, Timer.HOLD, f"{hold.id}#{count}")

    @property
    def is_open(self) -> bool:
        return self.state.mode is Mode.OPEN

    @property
    def keeps_queue(self) -> bool:
        """Who waits is not refused: served here, or by whoever has the session next."""
        return self.state.mode in KEEPING
