"""One `step` call in progress: state, effects, and operations on log, process and clocks.

A `Transition` collects the state, the log entries and the effects. Its operations also start, stop
and give up the process, send frames, and run the clocks of a turn and the idle time of a hold. The
handlers that use it decide when. `step.py` has the entry point.

A `Transition` keeps the log and the agent's stdin in order. All entries of one step form one
append, which comes before all other effects. An effect that must not happen before its events are
durable is deferred. If the store is broken, waiting is pointless: the effect happens immediately,
marked as not durable. Frames are written one at a time. The number of frames that wait is limited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import ProtocolOutput, ProtocolState
from banksman.core.dialects.meaning import BackgroundTask, Meaning, TurnOver
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
from banksman.core.session.state import (
    KEEPING,
    Deferred,
    Mode,
    ProcessPhase,
    ProcessState,
    Session,
    Stdin,
    Store,
)
from banksman.core.session.turn import Cause, Move, Turn, TurnPhase
from banksman.errors import AgentError, BanksmanError, UsageError

# Limit on frames that wait for the pipe. Normally there are a few interrupts and answers. More of
# them mean an agent that keeps sending requests and never reads.
OUTBOX_FRAMES_MAX = 1024


class Transition:
    """State and effects of a step in progress, with operations that keep them consistent."""

    __slots__ = ("at", "effects", "entries", "heard", "state")

    def __init__(self, state: Session, at: float) -> None:
        self.state: Session = state
        self.at = at
        self.effects: list[Effect] = []
        self.entries: list[Entry] = []
        # Meanings of frames that were sent, applied after the current fact.
        self.heard: list[Meaning] = []

    def set(self, **changes: Any) -> None:
        """Replace fields of the session."""
        self.state = replace(self.state, **changes)

    def set_process(self, **changes: Any) -> None:
        """Replace fields of the process."""
        self.state = replace(self.state, process=replace(self.state.process, **changes))

    def set_turn(self, turn: Turn) -> None:
        """Store a turn in its place: the granted one, or the agent-initiated one."""
        state = self.state
        if turn.ask is None:
            assert state.own is not None
            self.state = replace(state, own=turn)
        else:
            assert state.turn is not None
            self.state = replace(state, turn=turn)

    def set_tasks(self, tasks: tuple[BackgroundTask, ...]) -> None:
        """Record the background tasks of the agent, and log a change.

        While the log cannot be written, the process is being stopped, and has no tasks to keep.
        """
        if self.state.store is Store.WORKING and tasks != self.state.process.tasks:
            self.set_process(tasks=tasks)
            self.log(self.speaker, kinds.TASKS_CHANGED, tasks=tasks)

    def do(self, effect: Effect) -> None:
        """Add an effect."""
        self.effects.append(effect)

    def start_timer(self, seconds: float, timer: Timer, subject: str) -> None:
        """Start a timer relative to the time of this fact, or restart it."""
        self.effects.append(StartTimer(self.at + seconds, (timer, subject)))

    def cancel_timer(self, timer: Timer, subject: str) -> None:
        """Cancel a timer."""
        self.effects.append(CancelTimer((timer, subject)))

    @property
    def speaker(self) -> str | None:
        """The id of the turn that the agent's current output, and replies to it, belong to."""
        speaking = self.state.speaking
        return None if speaking is None else speaking.id

    # -- the log ----------------------------------------------------------------------------------
    def log(self, turn: str | None, kind: str, /, **body: object) -> None:
        """Append an entry to the log. While the store is broken, only endings of turns are kept."""
        if self.state.store is Store.WORKING:
            self.entries.append(entry(turn, kind, **body))
        elif kind == kinds.TURN_ENDED:
            # Each ask has one ending, so the number of asks that were open at the failure bounds
            # this.
            self.set(unwritten=(*self.state.unwritten, entry(turn, kind, **body)))

    def after_commit(self, deferred: Deferred) -> None:
        """Perform an effect once everything logged so far is durable."""
        state = self.state
        if state.store is not Store.WORKING:
            self.do_undurably(deferred)
            return
        self.set(deferred=(*state.deferred, (state.head + len(self.entries), deferred)))

    def do_undurably(self, deferred: Deferred) -> None:
        """Perform a deferred effect although its events are not durable, and mark it so."""
        match deferred:
            case Resolve(turn=turn, outcome=outcome):
                self.do(Resolve(turn, dataclasses.replace(outcome, durable=False)))
            case GiveReceipt() | Finish() | SettingTaken():
                self.do(deferred)
            case TellAnswer():
                self.do(replace(deferred, error=self.state.store_error))
            case LeaveInLog():
                raise AssertionError("the failure of the log has answered all callers")
            case _:
                pass  # Without a log, no ask is accepted and no prompt is sent.

    def done(self) -> tuple[Session, list[Effect]]:
        """Return the new state and the effects. The append comes first."""
        if self.entries:
            self.set(head=self.state.head + len(self.entries))
            self.effects.insert(0, Append(tuple(self.entries)))
        return self.state, self.effects

    # -- the process ------------------------------------------------------------------------------
    def start_process(self, schema: Mapping[str, Any] | None, traceparent: str | None) -> None:
        """Start a process that resumes or forks the session's conversation."""
        state = self.state
        assert state.process.phase is ProcessPhase.NONE
        number = state.process.number + 1
        conversation = state.conversation or state.fork_of
        forks = conversation is not None and state.conversation is None
        starting = ProcessPhase.STARTING
        self.set(
            process=ProcessState(
                number=number, phase=starting, resumes=conversation, forks=forks, schema=schema
            )
        )
        # The start timer begins with `Started`, because the process may wait for a place in the
        # pool.
        self.do(
            StartProcess(
                number,
                conversation,
                forks,
                state.settings,
                agent=state.config.agent,
                traceparent=traceparent,
            )
        )

    def stop_process(self, error: BanksmanError | None = None) -> None:
        """Stop the process by the ladder.

        Its output is still read, and its end is what ends an open turn.
        """
        process = self.state.process
        if process.phase is ProcessPhase.NONE or process.was_told_to_stop:
            return
        self.set_process(
            phase=ProcessPhase.STOPPING,
            was_told_to_stop=True,
            outbox=(),
            error=process.error or error,
        )
        self.do(StopProcess(process.number))

    def give_up_process(self, error: BanksmanError) -> None:
        """Stop a process that has become unusable.

        Its turn fails for this reason, unless it was already to end for another one.
        """
        for turn in (self.state.turn, self.state.own):
            if turn is not None and turn.phase is TurnPhase.RUNNING:
                self.set_turn(replace(turn.moved(Move.STOP), cause=Cause.REPLACE))
        self.stop_process(error)

    def speak(
        self,
        turn: str | None,
        say: Callable[[ProtocolState], ProtocolOutput],
        unsaid: Meaning | None = None,
    ) -> None:
        """Send something to the agent in its dialect, if the handshake has begun.

        `unsaid`: the meaning to apply if the dialect cannot encode it. Callers' values are checked
        before they get here, but only one by one, so a combination can still fail.
        """
        protocol = self.state.process.protocol
        if protocol is not None:
            try:
                output = say(protocol)
            except UsageError as exc:
                if unsaid is None:
                    raise
                self.heard.append(
                    replace(unsaid, error=str(exc)) if isinstance(unsaid, TurnOver) else unsaid
                )
                return
            self.set_process(protocol=output.protocol)
            for frame in output.frames:
                self.send(turn, frame)
            self.heard += output.meanings

    def send(self, turn: str | None, data: bytes) -> None:
        """Send one whole frame to the agent, in order, unless its process is being stopped."""
        process = self.state.process
        if (
            process.phase not in (ProcessPhase.STARTING, ProcessPhase.READY)
            or process.stdin is Stdin.BROKEN
        ):
            return
        if self.state.store is Store.WORKING:
            self.entries.append((turn, kinds.SENT, data.rstrip(b"\n")))
        if process.stdin is Stdin.FREE:
            self._write(data)
        elif len(process.outbox) >= OUTBOX_FRAMES_MAX:
            message = f"the agent does not read its stdin: {OUTBOX_FRAMES_MAX} frames are waiting"
            self.break_stdin(AgentError(message))
        else:
            self.set_process(outbox=(*process.outbox, data))

    def send_next(self) -> None:
        """Start the next frame, now that the pipe has taken the previous one whole."""
        process = self.state.process
        if process.stdin is not Stdin.BUSY:
            return
        self.cancel_timer(Timer.WRITE, f"{process.number}.{process.frames_sent}")
        self.set_process(stdin=Stdin.FREE)
        if process.outbox:
            self.set_process(outbox=process.outbox[1:])
            self._write(process.outbox[0])

    def break_stdin(self, error: BanksmanError) -> None:
        """Give up the process, because a frame may have been cut and no frame may follow that."""
        self.set_process(stdin=Stdin.BROKEN, outbox=())
        self.give_up_process(error)

    def _write(self, data: bytes) -> None:
        process = self.state.process
        assert process.stdin is Stdin.FREE
        count = process.frames_sent + 1
        self.set_process(stdin=Stdin.BUSY, frames_sent=count)
        self.do(WriteFrame(process.number, data))
        self.start_timer(self.state.config.write_seconds, Timer.WRITE, f"{process.number}.{count}")

    # -- clocks and holds -------------------------------------------------------------------------
    def attend_clocks(self) -> None:
        """Pause and resume clocks after a question or a tool came or went."""
        ours = self.state.turn
        turn = ours if ours is not None and ours.is_open else self.state.own
        if turn is not None and turn.phase is TurnPhase.RUNNING:
            has_question = any(question.turn == turn.id for question in self.state.questions)
            has_tool = bool(turn.tools)
            turn = replace(turn, meter=turn.meter.paused(self.at, has_question=has_question))
            self.set_turn(turn)
            self.set(
                clocks=watchdogs.attend(
                    self.state.clocks, self.at, has_tool=has_tool, has_question=has_question
                )
            )
            self.arm_clocks(turn)

    def arm_clocks(self, turn: Turn) -> None:
        """Start the one timer of all clocks of a turn. It checks again when it fires."""
        due = watchdogs.next_at(self.state.clocks)
        if due is not None and turn.phase is TurnPhase.RUNNING:
            self.do(StartTimer(due, (Timer.CLOCKS, turn.key)))

    def watch_hold(self) -> None:
        """Restart the idle time of a hold that is in use. The previous timer becomes stale."""
        hold = self.state.hold
        assert hold is not None
        count = self.state.hold_asks + 1
        self.cancel_timer(Timer.HOLD, f"{hold.id}#{count - 1}")
        self.set(hold_asks=count)
        self.start_timer(self.state.config.hold_idle_seconds, Timer.HOLD, f"{hold.id}#{count}")

    def end_hold(self, by: str, *, caller: str | None = None) -> None:
        """Log the end of the granted hold, and let the other asks pass. `caller`: its releaser."""
        hold = self.state.hold
        assert hold is not None
        self.log(None, kinds.HOLD_ENDED, hold=hold.id, by=by, **kinds.named(caller))
        self.set(hold=None)

    @property
    def is_open(self) -> bool:
        """Whether the session accepts new asks."""
        return self.state.mode is Mode.OPEN

    @property
    def keeps_queue(self) -> bool:
        """Whether waiting asks are not refused: this host or the next owner serves them."""
        return self.state.mode in KEEPING
