"""Mistakes that a careful programmer could have made in the core, one by one: each must be found by the exploration.

A mutant replaces one function of the core by one that is wrong in a plausible way. It names the scenario, as small as
may be, in which it is found; the core without it passes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from banksman.core import arbiter, asking, closing, ending, granting, hearing, living, session, storing, timing
from banksman.core.arbiter import BACKGROUND, Queue, Waiting
from banksman.core.meaning import Replied, TurnOver
from banksman.core.outcome import By, Kind, Outcome
from banksman.core.session_facts import Resolve, Timer
from banksman.core.state import Deferred, MayWrite, ProcessPhase, Session, Stdin
from banksman.core.turn import Ask, Move, Phase, Turn
from banksman.core.work import Work

# Given the right function, the wrong one.
Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Mutant:
    name: str
    where: object
    function: str
    wrong: Wrong
    scenario: str

    @contextmanager
    def applied(self) -> Generator[None]:
        right = getattr(self.where, self.function)
        with mock.patch.object(self.where, self.function, self.wrong(right)):
            yield


MUTANTS: dict[str, Mutant] = {}


def _mutant(name: str, where: object, function: str, scenario: str) -> Callable[[Wrong], Wrong]:
    def register(wrong: Wrong) -> Wrong:
        MUTANTS[name] = Mutant(name, where, function, wrong, scenario)
        return wrong

    return register


# -- whose boundary it is --------------------------------------------------------------------------------------------
@_mutant("boundary not matched to its turn", hearing, "_may_be_of", "a boundary twice")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def may_be_of(work: Work, turn: Turn, over: TurnOver) -> bool:
        return True

    return may_be_of


@_mutant("own turn's boundary answers the ask", hearing, "_may_be_of", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def may_be_of(work: Work, turn: Turn, over: TurnOver) -> bool:
        return not over.refs or right(work, turn, over)

    return may_be_of


@_mutant("two outcomes when exit follows boundary", hearing, "_end_ours", "an exit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end_ours(work: Work, turn: Turn, boundary: TurnOver) -> None:
        right(work, turn, boundary)
        work.set(turn=turn)

    return end_ours


@_mutant("own turn is not ended when its boundary names ours", hearing, "_on_over", "a wordy agent")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_over(work: Work, over: TurnOver) -> None:
        own = work.state.own
        right(work, over)
        if over.refs and own is not None and work.state.own is None:
            work.set(own=own)

    return on_over


# -- interrupts and acknowledgements ---------------------------------------------------------------------------------
@_mutant("interrupt addressed to the session", asking, "interrupt", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def interrupt(work: Work, id: str, name: str) -> None:
        turn = work.state.turn
        right(work, id if turn is None else turn.id, name)

    return interrupt


@_mutant("next prompt does not wait for the acknowledgement", granting, "_is_free", "an interrupt and a withdrawal")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        process = state.process
        return process.phase is ProcessPhase.READY and process.stdin is Stdin.FREE and state.own is None

    return is_free


@_mutant("acknowledgement before init counts", hearing, "_on_reply", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_reply(work: Work, reply: Replied) -> None:
        key = dict(work.state.process.unacknowledged).get(reply.request)
        right(work, reply)
        turn = work.state.turn
        if turn is not None and turn.key == key:
            work.set_turn(replace(turn, is_acknowledged=True, can_interrupt=True))

    return on_reply


@_mutant("receipt forgotten", ending, "end", "a wordy agent, interrupted")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Work, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, replace(turn, interrupts=()), *args, **kwargs)

    return end


@_mutant("wish lost when the boundary was another's", ending, "stop", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop(work: Work, turn: Turn, cause: Any, clock: str | None = None) -> None:
        if turn.boundary is None:
            right(work, turn, cause, clock)

    return stop


# -- timers ----------------------------------------------------------------------------------------------------------
@_mutant("drain timer without a turn", timing, "fire", "late facts")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fire(work: Work, timer: Timer, subject: str) -> None:
        if timer is Timer.DRAIN:
            work.stop_process()
        else:
            right(work, timer, subject)

    return fire


@_mutant("settle timer acts on the next turn", timing, "fire", "late facts of a slow agent")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fire(work: Work, timer: Timer, subject: str) -> None:
        turn = work.state.turn
        right(work, timer, turn.key if timer is Timer.SETTLE and turn is not None else subject)

    return fire


@_mutant("drain timer goes with its turn", ending, "end", "no acknowledgement")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Work, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, turn, *args, **kwargs)
        work.cancel_timer(Timer.DRAIN, turn.key)

    return end


@_mutant("requeue keeps the attempt", Turn, "requeued", "three asks")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def requeued(turn: Turn) -> Turn:
        return replace(right(turn), attempt=turn.attempt)

    return requeued


# -- who is next -----------------------------------------------------------------------------------------------------
@_mutant("background preempts", arbiter, "preempts", "an own turn")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def preempts(priority: int, running: int) -> bool:
        return priority > running or priority == BACKGROUND

    return preempts


@_mutant("a newcomer overtakes a queued equal", arbiter, "enqueue", "three asks")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def enqueue(queue: Queue, waiting: Waiting) -> Queue:
        return (waiting, *queue)

    return enqueue


@_mutant("requeue at the tail", arbiter, "requeue", "three asks")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def requeue(queue: Queue, waiting: Waiting) -> Queue:
        return (*queue, waiting)

    return requeue


@_mutant("own turn is not preempted", granting, "_make_room", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def make_room(work: Work) -> None:
        if work.state.own is None:
            right(work)

    return make_room


@_mutant("prompt written while an own turn is open", granting, "_is_free", "an own turn and a log that fails")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        process = state.process
        is_ready = process.phase is ProcessPhase.READY and process.stdin is Stdin.FREE
        return is_ready and not process.unacknowledged

    return is_free


# -- asks that must not be lost --------------------------------------------------------------------------------------
@_mutant("grant lost when the waiter withdraws", asking, "withdraw", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def withdraw(work: Work, id: str) -> None:
        turn = work.state.turn
        if turn is not None and turn.id == id and turn.phase is Phase.STARTING:
            # Its outcome is given, and what it was granted stays with it.
            outcome = Outcome(kind=Kind.WITHDRAWN)
            ending.log_ended(work, id, outcome, By.WITHDRAWN)
            work.after_commit(Resolve(id, outcome))
            work.set_turn(replace(turn, may_write=False))
        else:
            right(work, id)

    return withdraw


@_mutant("exit while starting loses the ask", living, "_begin_again", "an exit while the log takes its time")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def begin_again(work: Work, turn: Turn, error: object) -> None:
        work.set(turn=None)

    return begin_again


@_mutant("close forgets the queue", closing, "_refuse_queue", "a drain")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_queue(work: Work) -> None:
        work.set(queue=(), collecting=(), hold=None)

    return refuse_queue


@_mutant("steered ask forgotten", ending, "end", "steered")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Work, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, replace(turn, steered=()), *args, **kwargs)

    return end


@_mutant("steered prompt sent before the log has it", asking, "_steer", "steered")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def steer(work: Work, ask: Ask) -> bool:
        is_steered = right(work, ask)
        if is_steered:
            assert work.state.turn is not None
            asking.send_steered(work, work.state.turn.key, ask.id)
        return is_steered

    return steer


@_mutant("steered and not sent is forgotten", ending, "_requeue_unsent", "steered while the log takes its time")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def requeue_unsent(work: Work, turn: Turn) -> None:
        pass

    return requeue_unsent


@_mutant("collected asks go with the first", asking, "_withdraw_queued", "collected")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def withdraw_queued(work: Work, id: str) -> bool:
        turn = arbiter.find(work.state.queue, id)
        if turn is None or turn.id != id:
            return right(work, id)
        assert turn.ask is not None
        asking.take_out(work, turn)
        ending.end_queued(work, turn.ask, Kind.WITHDRAWN)
        return True

    return withdraw_queued


@_mutant("dropped ask comes back", asking, "_make_place", "a full queue")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def make_place(work: Work, ask: Any) -> None:
        queue = work.state.queue
        right(work, ask)
        work.set(queue=queue)

    return make_place


@_mutant("hold not released", asking, "release", "two holds")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def release(work: Work, id: str) -> None:
        pass

    return release


# -- the log ---------------------------------------------------------------------------------------------------------
@_mutant("outcome before it is durable", Work, "after_commit", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def after_commit(work: Work, deferred: Deferred) -> None:
        if isinstance(deferred, Resolve):
            work.do(deferred)
        else:
            right(work, deferred)

    return after_commit


@_mutant("prompt before the intent is durable", Work, "after_commit", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def after_commit(work: Work, deferred: Deferred) -> None:
        turn = work.state.turn
        if isinstance(deferred, MayWrite) and turn is not None:
            work.set_turn(replace(turn, may_write=True))
        else:
            right(work, deferred)

    return after_commit


@_mutant("store failure forgets the queue", storing, "_lose_store", "a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def lose_store(work: Work, error: Any) -> None:
        work.set(queue=())
        right(work, error)

    return lose_store


@_mutant("store failure resolves what was never accepted", storing, "_lose_store", "a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def lose_store(work: Work, error: Any) -> None:
        work.set(deferred=())
        right(work, error)

    return lose_store


# -- the process and the pipe ----------------------------------------------------------------------------------------
@_mutant("a partial frame followed by another", Work, "break_stdin", "a cut frame")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def break_stdin(work: Work, error: object) -> None:
        work.send_next()

    return break_stdin


@_mutant("frames do not wait for each other", Work, "send", "a cut frame")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def send(work: Work, turn: str | None, data: bytes) -> None:
        if work.state.process.stdin is Stdin.BUSY:
            work.set_process(stdin=Stdin.FREE)
        right(work, turn, data)

    return send


@_mutant("facts of an older process count", session, "_is_current", "late facts of a process")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_current(state: Session, fact: object) -> bool:
        return state.process.phase is not ProcessPhase.NONE

    return is_current


@_mutant("outbox survives the order to stop", Work, "stop_process", "a cut frame")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop_process(work: Work, error: Any = None) -> None:
        outbox = work.state.process.outbox
        right(work, error)
        work.set_process(outbox=outbox)

    return stop_process


@_mutant("the turn stays RUNNING when it is told to stop", ending, "stop", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop(work: Work, turn: Turn, cause: Any, clock: str | None = None) -> None:
        if turn.phase is Phase.RUNNING and turn.boundary is None:
            stopped = replace(turn.moved(Move.STOP), cause=cause)
            work.set_turn(replace(stopped, phase=Phase.RUNNING))
            ending.interrupt(work, turn)
        else:
            right(work, turn, cause, clock)

    return stop
