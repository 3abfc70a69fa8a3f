"""Mutants of the core: plausible mistakes of a careful programmer, each of which a test must find.

A mutant replaces one function of the core by a wrong one. It names the smallest scenario in which the exploration finds
it. If the exploration cannot observe the mistake, it names a test that fails. The original core passes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from msgspec.structs import replace
from tests.core.session import (
    test_agent_conversation,
    test_background_tasks,
    test_budget,
    test_crash_recovery,
    test_deadlines,
    test_fallback,
    test_history,
    test_idle_process,
    test_limit_wait,
    test_questions,
    test_settings,
    test_shutdown_drain,
    test_watchdogs_session,
)

from banksman.core.dialects.dialect import Decision, Verdict
from banksman.core.dialects.meaning import Replied, Thought, TurnOver, UsageReported
from banksman.core.session import (
    agent_conversation,
    agent_output,
    ask_queue,
    asks,
    budget_gate,
    crash_recovery,
    durability,
    fallback,
    grants,
    hand_over,
    idle_process,
    limit_wait,
    live_state,
    permissions,
    process_life,
    provider_limits,
    settings,
    shutdown,
    step,
    timers,
    tool_cleanup,
    turn_boundary,
    turn_end,
    turn_log,
    turn_usage,
    watchdogs,
)
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session import questions as questioning
from banksman.core.session import replay as replaying
from banksman.core.session.ask_queue import BACKGROUND, Queue, Waiting
from banksman.core.session.budget import CapUse
from banksman.core.session.effects import Effect, Finish, ReportIdle, Resolve, StartProcess, TellAnswer
from banksman.core.session.event import Entry, Event, entry
from banksman.core.session.facts import Timer
from banksman.core.session.history import SessionHistory
from banksman.core.session.idempotency import KEYS_MAX, IdempotencyKeys
from banksman.core.session.outcome import By, Kind, Outcome
from banksman.core.session.state import (
    Deferred,
    LimitWait,
    MayWrite,
    Mode,
    ProcessPhase,
    ProcessState,
    Replacement,
    Session,
    Stdin,
)
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Ask, Cause, Move, Turn, TurnPhase
from banksman.core.session.usage import NO_USAGE, Usage
from banksman.core.session.watchdogs import ClockName
from banksman.errors import BanksmanError, Closed, ProgramNotFound

# Takes the right function and returns the wrong one.
Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Mutant:
    name: str
    where: object
    function: str
    wrong: Wrong
    found_by: str | Callable[[], None]

    @contextmanager
    def applied(self) -> Generator[None]:
        right = getattr(self.where, self.function)
        with mock.patch.object(self.where, self.function, self.wrong(right)):
            yield


MUTANTS: dict[str, Mutant] = {}


def _mutant(name: str, where: object, function: str, found_by: str | Callable[[], None]) -> Callable[[Wrong], Wrong]:
    def register(wrong: Wrong) -> Wrong:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, where, function, wrong, found_by)
        return wrong

    return register


# -- usage -----------------------------------------------------------------------------------------------------------
@_mutant("usage forgotten on replay", replaying, "_count", "usage")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def count(state: Session, *_reported: Any) -> Session:
        return state

    return count


@_mutant("usage counted by each ask of a turn", turn_log, "counted", "usage of collected asks")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def counted(work: Transition, turn: Turn | None, used: Usage | None) -> dict[str, object]:
        return right(work, turn, used) | ({"added": used} if turn is None else {})

    return counted


@_mutant("reported usage counted again at the end", turn_usage, "report", "usage")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def report(work: Transition, report: UsageReported) -> None:
        right(work, report)
        turn = work.state.speaking
        if turn is not None:
            work.set_turn(replace(turn, meter=replace(turn.meter, logged=NO_USAGE)))

    return report


# -- budgets ---------------------------------------------------------------------------------------------------------
@_mutant("budget forgotten on replay", replaying, "_use", "a budget, and a host that dies")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def use(state: Session, event: Event) -> Session:
        return state

    return use


@_mutant("turn granted although its budget is used up", budget_gate, "reached", "a budget")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def reached(state: Session, at: float) -> tuple[CapUse, ...]:
        return state.shared

    return reached


@_mutant("budget not compared before a granted turn is sent", budget_gate, "must_wait", "a shared budget")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def must_wait(work: Transition, turn: Turn) -> bool:
        return False

    return must_wait


@_mutant("prompt sent before its claim is decided", budget_gate, "claim", "a shared budget")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def claim(work: Transition, turn: Turn) -> Turn:
        return replace(right(work, turn), may_spend=True)

    return claim


@_mutant("steered prompt passes a budget that is used up", budget_gate, "is_held", "a budget, steered")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_held(state: Session, caller: str | None, at: float) -> bool:
        return False

    return is_held


@_mutant("turn beyond its budget not stopped", budget_gate, "stop_turns", "a budget that stops")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def stop_turns(work: Transition, caps: Any) -> None:
        pass

    return stop_turns


@_mutant("question about budget left open at the close", budget_gate, "withdraw", "a budget that asks")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def withdraw(work: Transition, by: str) -> None:
        pass

    return withdraw


@_mutant("the next host asks again about the budget", budget_gate, "kept", "a budget, and a leave")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def kept(_past: SessionHistory) -> None:
        return None

    return kept


@_mutant("usage lost with the log", durability, "_lost_usage", "a budget, and a log that fails")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def lost_usage(work: Transition) -> list[Entry]:
        return []

    return lost_usage


@_mutant(
    "process kept for asks that wait for a budget",
    idle_process,
    "has_work",
    test_budget.test_waiting_asks_do_not_keep_process,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def has_work(state: Session, at: float) -> bool:
        return state.is_busy

    return has_work


# -- assignment of boundaries ----------------------------------------------------------------------------------------
@_mutant("boundary not matched to its turn", turn_boundary, "_may_be_of", "a boundary twice")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def may_be_of(work: Transition, turn: Turn, over: TurnOver) -> bool:
        return True

    return may_be_of


@_mutant("own turn's boundary answers the ask", turn_boundary, "_may_be_of", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def may_be_of(work: Transition, turn: Turn, over: TurnOver) -> bool:
        return not over.refs or right(work, turn, over)

    return may_be_of


@_mutant("two outcomes when exit follows boundary", turn_boundary, "_end_ours", "an exit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end_ours(work: Transition, turn: Turn, boundary: TurnOver) -> None:
        right(work, turn, boundary)
        work.set(turn=turn)

    return end_ours


@_mutant("own turn is not ended when its boundary names ours", turn_boundary, "on_over", "a wordy agent")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_over(work: Transition, over: TurnOver) -> None:
        own = work.state.own
        right(work, over)
        if over.refs and own is not None and work.state.own is None:
            work.set(own=own)

    return on_over


# -- interrupts and acknowledgements ---------------------------------------------------------------------------------
@_mutant("interrupt addressed to the session", asks, "interrupt", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def interrupt(work: Transition, id: str, name: str) -> None:
        turn = work.state.turn
        right(work, id if turn is None else turn.id, name)

    return interrupt


@_mutant("next prompt does not wait for the acknowledgement", grants, "_is_free", "an interrupt and a withdrawal")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        process = state.process
        return process.phase is ProcessPhase.READY and process.stdin is Stdin.FREE and state.own is None

    return is_free


@_mutant("acknowledgement before init counts", agent_output, "_on_reply", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_reply(work: Transition, reply: Replied) -> None:
        key = dict(work.state.process.unacknowledged).get(reply.request)
        right(work, reply)
        turn = work.state.turn
        if turn is not None and turn.key == key:
            work.set_turn(replace(turn, is_acknowledged=True, can_interrupt=True))

    return on_reply


@_mutant("receipt forgotten", turn_end, "end", "a wordy agent, interrupted")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Transition, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, replace(turn, interrupts=()), *args, **kwargs)

    return end


@_mutant("wish lost when the boundary was another's", turn_end, "stop", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop(work: Transition, turn: Turn, cause: Any, clock: str | None = None) -> None:
        if turn.boundary is None:
            right(work, turn, cause, clock)

    return stop


# -- timers ----------------------------------------------------------------------------------------------------------
@_mutant("drain timer without a turn", timers, "fire", "late facts")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fire(work: Transition, timer: Timer, subject: str) -> None:
        if timer is Timer.DRAIN:
            work.stop_process()
        else:
            right(work, timer, subject)

    return fire


@_mutant("settle timer acts on the next turn", timers, "fire", "late facts of a slow agent")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fire(work: Transition, timer: Timer, subject: str) -> None:
        turn = work.state.turn
        right(work, timer, turn.key if timer is Timer.SETTLE and turn is not None else subject)

    return fire


@_mutant("drain timer goes with its turn", turn_end, "end", "no acknowledgement")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Transition, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, turn, *args, **kwargs)
        work.cancel_timer(Timer.DRAIN, turn.key)

    return end


@_mutant("requeue keeps the attempt", Turn, "requeued", "three asks")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def requeued(turn: Turn) -> Turn:
        return replace(right(turn), attempt=turn.attempt)

    return requeued


# -- scheduling ------------------------------------------------------------------------------------------------------
@_mutant("background preempts", ask_queue, "preempts", "an own turn")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def preempts(priority: int, running: int) -> bool:
        return priority > running or priority == BACKGROUND

    return preempts


@_mutant("a newcomer overtakes a queued equal", ask_queue, "enqueue", "three asks")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def enqueue(queue: Queue, waiting: Waiting) -> Queue:
        return (waiting, *queue)

    return enqueue


@_mutant("requeue at the tail", ask_queue, "requeue", "three asks")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def requeue(queue: Queue, waiting: Waiting) -> Queue:
        return (*queue, waiting)

    return requeue


@_mutant("own turn is not preempted", grants, "_make_room", "an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def make_room(work: Transition) -> None:
        if work.state.own is None:
            right(work)

    return make_room


@_mutant("prompt written while an own turn is open", grants, "_is_free", "an own turn and a log that fails")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        process = state.process
        is_ready = process.phase is ProcessPhase.READY and process.stdin is Stdin.FREE
        return is_ready and not process.unacknowledged

    return is_free


# -- asks that must not be lost --------------------------------------------------------------------------------------
@_mutant("grant lost when the waiter withdraws", asks, "withdraw", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def withdraw(work: Transition, id: str) -> None:
        turn = work.state.turn
        if turn is not None and turn.id == id and turn.phase is TurnPhase.STARTING:
            # The outcome is given, but the grant is kept.
            outcome = Outcome(kind=Kind.WITHDRAWN)
            turn_log.log_ended(work, id, outcome, By.WITHDRAWN)
            work.after_commit(Resolve(id, outcome))
            work.set_turn(replace(turn, may_write=False))
        else:
            right(work, id)

    return withdraw


@_mutant("exit while starting loses the ask", process_life, "_begin_again", "an exit while the log takes its time")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def begin_again(work: Transition, turn: Turn, error: object) -> None:
        work.set(turn=None)

    return begin_again


@_mutant("close forgets the queue", shutdown, "_refuse_queue", "a drain")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_queue(work: Transition) -> None:
        work.set(queue=(), collecting=(), hold=None)

    return refuse_queue


# -- tools that outlive their turn -------------------------------------------------------------------------------------
@_mutant("a prompt beside what the turn before has left", grants, "_is_free", "tools that live on")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        return right(replace(state, process=replace(state.process, sweeps=())))

    return is_free


@_mutant("two sweeps at once", tool_cleanup, "after", "tools that live on, and an own turn")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def after(work: Transition, turn: Turn) -> None:
        work.set_process(sweeps=())
        right(work, turn)

    return after


@_mutant("a sweep without an end", tool_cleanup, "swept", "tools that live on")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def swept(work: Transition, fact: object) -> None:
        work.cancel_timer(Timer.SWEEP, str(work.state.process.number))

    return swept


@_mutant("steered ask forgotten", turn_end, "end", "steered")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end(work: Transition, turn: Turn, *args: Any, **kwargs: Any) -> None:
        right(work, replace(turn, steered=()), *args, **kwargs)

    return end


@_mutant("steered prompt sent before the log has it", asks, "_steer", "steered")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def steer(work: Transition, ask: Ask) -> bool:
        is_steered = right(work, ask)
        if is_steered:
            assert work.state.turn is not None
            asks.send_steered(work, work.state.turn.key, ask.id)
        return is_steered

    return steer


@_mutant("steered and not sent is forgotten", turn_end, "_requeue_unsent", "steered while the log takes its time")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def requeue_unsent(work: Transition, turn: Turn) -> None:
        pass

    return requeue_unsent


@_mutant("collected asks go with the first", asks, "_withdraw_queued", "collected")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def withdraw_queued(work: Transition, id: str) -> bool:
        turn = ask_queue.find(work.state.queue, id)
        if turn is None or turn.id != id:
            return right(work, id)
        assert turn.ask is not None
        asks.take_out(work, turn)
        turn_end.end_queued(work, turn.ask, Kind.WITHDRAWN)
        return True

    return withdraw_queued


@_mutant("dropped ask comes back", asks, "_make_place", "a full queue")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def make_place(work: Transition, ask: Any) -> None:
        queue = work.state.queue
        right(work, ask)
        work.set(queue=queue)

    return make_place


@_mutant("hold not released", asks, "release", "two holds")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def release(work: Transition, id: str) -> None:
        pass

    return release


# -- the log ---------------------------------------------------------------------------------------------------------
@_mutant("outcome before it is durable", Transition, "after_commit", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def after_commit(work: Transition, deferred: Deferred) -> None:
        if isinstance(deferred, Resolve):
            work.do(deferred)
        else:
            right(work, deferred)

    return after_commit


@_mutant("prompt before the intent is durable", Transition, "after_commit", "a log that takes its time")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def after_commit(work: Transition, deferred: Deferred) -> None:
        turn = work.state.turn
        if isinstance(deferred, MayWrite) and turn is not None:
            work.set_turn(replace(turn, may_write=True))
        else:
            right(work, deferred)

    return after_commit


@_mutant("store failure forgets the queue", durability, "_lose_store", "a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def lose_store(work: Transition, error: Any) -> None:
        work.set(queue=())
        right(work, error)

    return lose_store


@_mutant("store failure resolves what was never accepted", durability, "_lose_store", "a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def lose_store(work: Transition, error: Any) -> None:
        work.set(deferred=())
        right(work, error)

    return lose_store


# -- the process and the pipe ----------------------------------------------------------------------------------------
@_mutant("a partial frame followed by another", Transition, "break_stdin", "a cut frame")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def break_stdin(work: Transition, error: object) -> None:
        work.send_next()

    return break_stdin


@_mutant("frames do not wait for each other", Transition, "send", "a cut frame")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def send(work: Transition, turn: str | None, data: bytes) -> None:
        if work.state.process.stdin is Stdin.BUSY:
            work.set_process(stdin=Stdin.FREE)
        right(work, turn, data)

    return send


@_mutant("facts of an older process count", step, "_is_current", "late facts of a process")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def is_current(state: Session, fact: object) -> bool:
        return state.process.phase is not ProcessPhase.NONE

    return is_current


@_mutant("outbox survives the order to stop", Transition, "stop_process", "a cut frame")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop_process(work: Transition, error: Any = None) -> None:
        outbox = work.state.process.outbox
        right(work, error)
        work.set_process(outbox=outbox)

    return stop_process


@_mutant("the turn stays RUNNING when it is told to stop", turn_end, "stop", "an interrupt and a withdrawal")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop(work: Transition, turn: Turn, cause: Any, clock: str | None = None) -> None:
        if turn.phase is TurnPhase.RUNNING and turn.boundary is None:
            stopped = replace(turn.moved(Move.STOP), cause=cause)
            work.set_turn(replace(stopped, phase=TurnPhase.RUNNING))
            turn_end.interrupt(work, turn)
        else:
            right(work, turn, cause, clock)

    return stop


# -- idle processes --------------------------------------------------------------------------------------------------
@_mutant("eviction of a process with a running task", idle_process, "_is_idle", "tasks in the background")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def is_idle(state: Session) -> bool:
        return right(replace(state, process=replace(state.process, tasks=())))

    return is_idle


@_mutant(
    "a process with a running task is retired for its age",
    idle_process,
    "must_replace",
    test_idle_process.test_old_process_serves_while_background_tasks_run,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def must_replace(state: Session, turn: Turn) -> str | None:
        return right(replace(state, process=replace(state.process, tasks=())), turn)

    return must_replace


@_mutant(
    "what the agent waits to hear does not spare it",
    idle_process,
    "_is_idle",
    partial(test_idle_process.test_needed_process_is_neither_evicted_nor_idle, "callback"),
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def is_idle(state: Session, at: float) -> bool:
        return right(replace(state, callbacks=(), questions=()), at)

    return is_idle


@_mutant("idle timer without its rest", idle_process, "on_idle_long", "late facts of an idle process")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def on_idle_long(work: Transition, key: str) -> None:
        idle_process.evict(work, "idle")

    return on_idle_long


@_mutant(
    "idle timer of an earlier rest",
    idle_process,
    "_idle_key",
    test_idle_process.test_idle_timer_of_earlier_rest_does_not_end_later_one,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def idle_key(state: Session) -> str:
        return str(state.process.number)

    return idle_key


@_mutant("eviction of a process in use", idle_process, "evict", "an eviction")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def evict(work: Transition, reason: str) -> None:
        if work.state.process.phase is ProcessPhase.READY:
            idle_process.retire(work, reason)

    return evict


@_mutant("retired while a turn is open", idle_process, "look", "another configuration")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def look(work: Transition) -> None:
        process = work.state.process
        if process.stale is Replacement.NOW and process.phase is ProcessPhase.READY:
            idle_process.retire(work, "stale")
        right(work)

    return look


@_mutant(
    "nobody is told that it is idle",
    Transition,
    "do",
    test_idle_process.test_process_reports_ready_and_idle_to_pool,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def do(work: Transition, effect: Effect) -> None:
        if not isinstance(effect, ReportIdle):
            right(work, effect)

    return do


@_mutant(
    "a rest has no end",
    idle_process,
    "look",
    test_idle_process.test_process_reports_ready_and_idle_to_pool,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def look(work: Transition) -> None:
        since = work.state.idle_since
        right(work)
        if since is not None:
            work.set(idle_since=since)

    return look


# -- replaced processes ----------------------------------------------------------------------------------------------
@_mutant(
    "stale process given the next turn",
    idle_process,
    "must_replace",
    test_settings.test_unanswered_setting_replaces_process_after_its_turn,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def must_replace(state: Session, turn: Turn) -> str | None:
        return right(replace(state, process=replace(state.process, stale=Replacement.NO)), turn)

    return must_replace


@_mutant(
    "what was granted goes to a process that has become stale",
    grants,
    "_write_prompt",
    test_settings.test_granted_prompt_moves_to_next_process_when_setting_is_unanswered,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def write_prompt(work: Transition, turn: Turn) -> None:
        stale = work.state.process.stale
        work.set_process(stale=Replacement.NO)
        right(work, turn)
        work.set_process(stale=stale)

    return write_prompt


@_mutant(
    "a schema is not looked at",
    idle_process,
    "must_replace",
    test_agent_conversation.test_changed_schema_starts_new_process,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def must_replace(state: Session, turn: Turn) -> str | None:
        reason = right(state, turn)
        return None if reason == "schema" else reason

    return must_replace


@_mutant(
    "one that has saved is kept",
    turn_end,
    "_end_ours",
    test_idle_process.test_old_process_is_asked_to_save_and_replaced_after,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end_ours(work: Transition, turn: Turn, *args: Any) -> None:
        assert turn.ask is not None
        right(work, replace(turn, ask=replace(turn.ask, is_last=False)), *args)

    return end_ours


@_mutant(
    "the next process is for no conversation",
    Transition,
    "start_process",
    test_idle_process.test_idle_process_is_retired_and_next_ask_resumes,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def start_process(work: Transition, *how: Any) -> None:
        right(work, *how)
        last = work.effects.pop()
        assert isinstance(last, StartProcess)
        work.do(replace(last, conversation=None))

    return start_process


@_mutant(
    "an age is of no process",
    idle_process,
    "on_old",
    test_idle_process.test_age_timer_of_dead_process_is_ignored,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_old(work: Transition, subject: str) -> None:
        right(work, str(work.state.process.number))

    return on_old


# -- processes that fail to start ------------------------------------------------------------------------------------
@_mutant("start timer never armed", process_life, "started", "an exit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def started(work: Transition, fact: Any) -> None:
        right(work, fact)
        work.effects.pop()

    return started


@_mutant("back-off that never ends", idle_process, "on_backed_off", "one crash after the other")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def on_backed_off(work: Transition, subject: str) -> None:
        pass

    return on_backed_off


@_mutant(
    "back-off that keeps nobody back",
    idle_process,
    "count_crash",
    test_idle_process.test_crashes_back_off_longer_after_the_first,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def count_crash(work: Transition, process: ProcessState) -> None:
        right(work, process)
        work.set(is_backing_off=False)

    return count_crash


@_mutant(
    "crashes are never forgiven",
    turn_boundary,
    "on_over",
    test_idle_process.test_ask_during_backoff_is_served_after_it,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_over(work: Transition, over: TurnOver) -> None:
        crashes = work.state.crashes
        right(work, over)
        work.set(crashes=crashes)

    return on_over


@_mutant(
    "what we stopped is a crash",
    process_life,
    "lost",
    test_idle_process.test_failed_start_counts_as_crash_and_stopped_one_does_not,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def lost(work: Transition, *args: Any, **kwargs: Any) -> None:
        work.set_process(was_told_to_stop=False)
        right(work, *args, **kwargs)

    return lost


# -- settings --------------------------------------------------------------------------------------------------------
@_mutant(
    "prompt sent while a setting is unanswered",
    grants,
    "_is_free",
    test_settings.test_setting_blocks_prompts_until_answered,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def is_free(state: Session) -> bool:
        return right(replace(state, process=replace(state.process, changes=())))

    return is_free


@_mutant("setting's promise lost when the process dies", settings, "forget_all", "another model, and an exit")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def forget_all(work: Transition) -> None:
        pass

    return forget_all


@_mutant("a setting that is not answered holds everything up", settings, "expire", "another model")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, request: str) -> None:
        pass

    return expire


@_mutant(
    "one that did not answer is kept",
    settings,
    "expire",
    test_settings.test_unanswered_setting_replaces_process,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, request: str) -> None:
        right(work, request)
        work.set_process(stale=Replacement.NO)

    return expire


@_mutant(
    "a setting that was refused is had",
    settings,
    "on_reply",
    test_settings.test_setting_refused_by_agent_is_dropped,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_reply(work: Transition, reply: Replied) -> None:
        right(work, replace(reply, error=None))

    return on_reply


@_mutant("a setting is told twice", settings, "_forget", "another model")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def forget(work: Transition, change: Any) -> None:
        pass

    return forget


# -- questions and callbacks -----------------------------------------------------------------------------------------
@_mutant("question answered twice", questioning, "forget", "a question")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def forget(work: Transition, id: str, answer: str, **more: Any) -> None:
        questions = work.state.questions
        right(work, id, answer, **more)
        work.set(questions=questions)

    return forget


@_mutant("a question has the agent's own name", questioning, "_name", "a late answer")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def name(work: Transition) -> str:
        return "q1"  # The toy's request id.

    return name


_lost = test_questions.test_question_name_lost_by_log_is_never_reused


@_mutant("a question has the name of one that the log lost", questioning, "_name", partial(_lost, "the log fails"))
@_mutant("a question has a name of another host's", questioning, "_name", partial(_lost, "the host dies"))
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def name(work: Transition) -> str:
        return f"q-0.{work.state.head + len(work.entries) + 1}"

    return name


@_mutant("the answer to a question is told too early", questioning, "forget", "a late answer, and a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def forget(work: Transition, id: str, answer: str, *, by: str, message: str | None = None) -> None:
        right(work, id, answer, by=by, message=message)
        *before, (_, told) = work.state.deferred
        assert isinstance(told, TellAnswer)
        work.set(deferred=tuple(before))
        work.do(told)

    return forget


@_mutant(
    "a question outlives its process",
    questioning,
    "forget_all",
    test_questions.test_question_outside_turns_ends_with_its_process,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def forget_all(work: Transition) -> None:
        pass

    return forget_all


@_mutant(
    "a late callback answer of an old process",
    questioning,
    "forget_all",
    test_questions.test_callback_of_dead_process_is_closed_and_its_answer_dropped,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def forget_all(work: Transition) -> None:
        for question in work.state.questions:
            questioning.forget(work, question.id, "withdrawn", by="exit")

    return forget_all


@_mutant(
    "what nobody answers is allowed",
    questioning,
    "expire",
    partial(test_questions.test_question_gets_default_answer_when_it_expires, "deny"),
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, id: str) -> None:
        message = f"no answer within {work.state.config.question_seconds:g} s"
        questioning.answer(work, id, Decision(allows=True, message=message, by="expiry"))

    return expire


@_mutant(
    "what a rule decided is asked all the same",
    questioning,
    "_verdict",
    partial(test_questions.test_rule_answers_permission, (("Bash", Verdict.DENY),), (), "A q deny: denied by a rule"),
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def verdict(work: Transition, asked: Any, speaking: Turn | None) -> None:
        return None

    return verdict


@_mutant(
    "the session's rules come first",
    permissions,
    "verdict",
    partial(
        test_questions.test_ruling_is_answered_at_once_without_question,
        (("*", Verdict.ALLOW),),
        (("Bash", Verdict.DENY),),
        "deny",
    ),
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def verdict(tool: str, layers: Any) -> Any:
        return right(tool, tuple(layers)[::-1])

    return verdict


@_mutant(
    "a denial that interrupts only denies",
    asks,
    "answer",
    test_questions.test_denial_with_interrupt_ends_turn_by_boundary,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def answer(work: Transition, fact: Any) -> None:
        questioning.answer(work, fact.question, fact.decision)

    return answer


@_mutant(
    "a denial that interrupts stops whoever speaks",
    asks,
    "answer",
    test_questions.test_interrupting_denial_of_answered_question_is_ignored,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def answer(work: Transition, fact: Any) -> None:
        right(work, fact)
        if fact.decision.interrupts and work.state.speaking is not None:
            turn_end.stop(work, work.state.speaking, Cause.INTERRUPT)

    return answer


# -- the conversation ------------------------------------------------------------------------------------------------
@_mutant(
    "conversation re-learnt after overflow",
    agent_conversation,
    "learn",
    test_agent_conversation.test_retired_conversation_name_is_not_learnt_again,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def learn(work: Transition, name: str) -> None:
        work.set_process(has_overflowed=False)
        right(work, name)

    return learn


@_mutant(
    "an overflow is only an error",
    agent_conversation,
    "notice_overflow",
    test_agent_conversation.test_overflow_of_small_prompt_ends_conversation_at_once,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def notice_overflow(work: Transition, over: TurnOver) -> None:
        pass

    return notice_overflow


@_mutant(
    "any overflow ends the conversation",
    agent_conversation,
    "notice_overflow",
    partial(test_agent_conversation.test_overflow_of_large_prompt_is_forgiven_once, True),
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def notice_overflow(work: Transition, over: TurnOver) -> None:
        work.set(overflows=1)
        right(work, over)

    return notice_overflow


@_mutant(
    "a turn costs all that went before it",
    agent_conversation,
    "with_cost",
    test_agent_conversation.test_turn_cost_is_growth_of_conversation_total,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def with_cost(work: Transition, over: TurnOver) -> TurnOver:
        return replace(right(work, over), cost=over.spent)

    return with_cost


@_mutant(
    "whoever comes after follows into another's conversation",
    process_life,
    "lose_conversation",
    partial(test_agent_conversation.test_next_process_does_not_resume_conversation_of_another_session, None),
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def lose_conversation(work: Transition, error: Any, held: str | None) -> None:
        work.give_up_process(error)

    return lose_conversation


# -- clocks ----------------------------------------------------------------------------------------------------------
@_mutant(
    "a tool is not watched",
    agent_output,
    "_use_tools",
    test_watchdogs_session.test_running_tool_runs_only_its_own_clock,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def use_tools(work: Transition, **calls: Any) -> None:
        pass

    return use_tools


@_mutant(
    "thinking is progress",
    watchdogs,
    "wind",
    partial(test_watchdogs_session.test_thought_winds_bytes_clock_and_not_progress, Thought(), "progress"),
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wind(them: Any, at: float, *names: ClockName) -> Any:
        return right(them, at, ClockName.BYTES, ClockName.PROGRESS)

    return wind


# -- crash recovery ----------------------------------------------------------------------------------------------------
_dies = test_crash_recovery.test_host_crash_at_any_point_keeps_every_guarantee
_settles = test_crash_recovery.test_log_cut_anywhere_leaves_begun_turns_unknown_and_others_queued


@_mutant("only the first of a turn is unknown", crash_recovery, "settle", partial(_dies, "collected"))
@_mutant("what was added to a turn is forgotten", crash_recovery, "settle", partial(_dies, "steered"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        turn = past.session.turn
        alone = None if turn is None else replace(turn, joined=(), steered=())
        return right(replace(past, session=replace(past.session, turn=alone)), **how)

    return settle


@_mutant("what waits is lost with its host", crash_recovery, "settle", partial(_settles, "asked and added"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        asked = [replace(past.session, turn=turn, own=None, queue=()) for turn in past.session.queue]
        lost = [entry for one in asked for entry in right(replace(past, session=one, questions=()))[:-1]]
        return [*lost, *right(past, **how)]

    return settle


@_mutant("what was granted is sent again", crash_recovery, "settle", partial(_dies, "two asks"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        turn = past.session.turn
        if turn is None or turn.phase is not TurnPhase.STARTING:
            return right(past, **how)
        again = [entry(turn.id, kinds.TURN_REQUEUED, attempt=turn.attempt + 1)]
        return [*again, *right(pasts.fold(past, again), **how)]

    return settle


@_mutant("a question waits for a process that is gone", crash_recovery, "settle", partial(_dies, "a question"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        return right(replace(past, questions=()), **how)

    return settle


@_mutant("a turn of the agent's own stays open", crash_recovery, "settle", partial(_dies, "an own turn"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        return right(replace(past, session=replace(past.session, own=None)), **how)

    return settle


@_mutant("settled again and again", crash_recovery, "settle", partial(_dies, "two asks"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, *, swept: Any = ()) -> list[Entry]:
        return right(past, swept=swept or ["nothing"])

    return settle


@_mutant(
    "total of the conversation forgotten by the recovery",
    crash_recovery,
    "settle",
    partial(_settles, "costs and settings"),
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **how: Any) -> list[Entry]:
        spent = str(past.session.spent).encode()
        return [(id, kind, data.replace(b'"spent":' + spent, b'"spent":null')) for id, kind, data in right(past, **how)]

    return settle


# -- a session that leaves its host ------------------------------------------------------------------------------------
@_mutant("a withdrawal at the last moment is lost", shutdown, "takes_back", "a leave, interrupted")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def takes_back(work: Transition, fact: object) -> bool:
        return False

    return takes_back


@_mutant("it leaves though the log lacks endings", shutdown, "_may_go", "a leave, and a log that fails twice")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def may_go(state: Session) -> bool:
        return True

    return may_go


@_mutant(
    "it leaves before it has accepted",
    shutdown,
    "_may_go",
    test_shutdown_drain.test_leave_waits_until_last_ask_is_acknowledged,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def may_go(state: Session) -> bool:
        return right(replace(state, deferred=()))

    return may_go


@_mutant("it has left though the log does not say so", shutdown, "take_back", "a leave, and a log that fails twice")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition) -> None:
        pass

    return nothing


@_mutant("holders are left behind", shutdown, "_end_holds", "a leave of holders")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition) -> None:
        pass

    return nothing


@_mutant("what was granted is sent by who leaves", turn_end, "put_back", "a leave, interrupted")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def put_back(work: Transition, again: Turn) -> None:
        if work.state.mode is not Mode.LEAVING:
            right(work, again)

    return put_back


@_mutant("who comes back finds nobody", ask_queue, "requeue", "a leave, interrupted")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def kept(queue: Queue, waiting: Waiting) -> Queue:
        return queue

    return kept


@_mutant("what waits is refused by who leaves", shutdown, "leave", "a leave, interrupted")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def leave(work: Transition, by: float | None) -> None:
        right(work, by)
        for waiting in work.state.queue:
            if isinstance(waiting, Turn):
                asks.drop(work, waiting, Kind.REFUSED, Closed("left"))

    return leave


@_mutant("a deadline is not kept", shutdown, "hurry", test_shutdown_drain.test_leave_uses_earliest_of_several_deadlines)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition) -> None:
        pass

    return nothing


# -- deadlines of asks, and background tasks ---------------------------------------------------------------------------
@_mutant("a deadline is forgotten on replay", replaying, "_queue", "a deadline, and a host that dies")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def queue(state: Session, id: str, body: dict[str, Any]) -> Session:
        return right(state, id, body | {"deadline": None})

    return queue


@_mutant("a deadline is not resumed", asks, "resume_deadlines", "a deadline, and a host that dies")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition) -> None:
        pass

    return nothing


@_mutant("a deadline ends only queued asks", asks, "expire", "a deadline")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, id: str) -> None:
        waiting = ask_queue.find(work.state.queue, id)
        if waiting is not None:
            asks.withdraw(work, id)

    return expire


@_mutant("a deadline ends only running turns", asks, "expire", "a deadline")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, id: str) -> None:
        if ask_queue.find(work.state.queue, id) is None:
            right(work, id)

    return expire


@_mutant("a deadline does not end a turn that gives way", turn_end, "stop", "a deadline")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def stop(work: Transition, turn: Turn, cause: Any, clock: str | None = None) -> None:
        if clock is None or turn.phase is not TurnPhase.INTERRUPTING:
            right(work, turn, cause, clock)

    return stop


@_mutant(
    "a deadline ends the turn of others",
    asks,
    "expire",
    test_deadlines.test_deadline_of_steered_ask_does_not_stop_the_turn_of_others,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, id: str) -> None:
        right(work, id)
        turn = work.state.turn
        if turn is not None and any(ask.id == id for ask in turn.asks):
            turn_end.stop(work, turn, Cause.CLOCK, watchdogs.DEADLINE)

    return expire


@_mutant("a drain ends background tasks", shutdown, "waits_for_tasks", "a drain, and tasks in the background")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def waits(work: Transition) -> bool:
        return False

    return waits


@_mutant(
    "a drain waits for background tasks forever",
    shutdown,
    "stop_waiting_for_tasks",
    "a leave, and tasks in the background",
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition) -> None:
        pass

    return nothing


_task_scenario = "tasks in the background, and a log that fails"


@_mutant("background tasks outlive the log that lost their end", replaying, "_fold_session", _task_scenario)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fold(state: Session, kind: str, body: dict[str, Any]) -> Session:
        return state if kind == kinds.SESSION_STORE_RETURNED else right(state, kind, body)

    return fold


@_mutant(
    "background tasks outlive their host", crash_recovery, "settle", "tasks in the background, and a host that dies"
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def settle(past: SessionHistory, **more: Any) -> list[Entry]:
        return [entry for entry in right(past, **more) if entry[1] != kinds.TASKS_CHANGED]

    return settle


@_mutant(
    "a deadline outlives its ask",
    turn_end,
    "forget_deadline",
    test_deadlines.test_ask_that_is_over_has_no_deadline,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition, ask: Ask) -> None:
        pass

    return nothing


@_mutant(
    "an outcome says nothing of background tasks",
    turn_end,
    "_end_ask",
    test_background_tasks.test_outcome_lists_tasks_that_still_run,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def end_ask(work: Transition, ask: Ask, outcome: Outcome, by: By, **counts: Any) -> None:
        right(work, ask, dataclasses.replace(outcome, background=()), by, **counts)

    return end_ask


# -- folding and snapshots ---------------------------------------------------------------------------------------------
_snapshot = test_history.test_history_from_any_snapshot_equals_history_from_start


def _forgets(name: str, history: str, **members: Any) -> None:
    """Register a mutant whose snapshots lack a member."""

    @_mutant(f"a snapshot without {name}", pasts, "encode", partial(_snapshot, history))
    def _(right: Callable[..., Any]) -> Callable[..., Any]:
        def encode(past: SessionHistory) -> bytes:
            return right(replace(past, session=replace(past.session, **members)))

        return encode


_forgets("settings", "costs and settings", settings=())
_forgets("the count of own turns", "costs and settings", own_count=0)
_forgets("what it has cost", "costs and settings", cost=None)
_forgets("the limits", "limits", limits=())
_forgets("the time of the limit", "limits", limited_until=None)
_forgets("the own turn", "costs and settings", own=None)
_forgets("the turn", "asked and added", turn=None)
_forgets("whose conversation it was", "adopted", is_adopted=False)
_forgets("what it is a copy of", "forked", fork_of=None)


@_mutant("a snapshot without the order of the queue", pasts, "encode", partial(_snapshot, "asked and added"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def encode(past: SessionHistory) -> bytes:
        queue = tuple(sorted(past.session.queue, key=lambda waiting: waiting.id))
        return right(replace(past, session=replace(past.session, queue=queue)))

    return encode


@_mutant("a snapshot without keys", pasts, "encode", partial(_snapshot, "costs and settings"))
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def encode(past: SessionHistory) -> bytes:
        return right(replace(past, keys=IdempotencyKeys()))

    return encode


@_mutant("the first keys are remembered", pasts, "_fold", test_history.test_history_keys_are_bounded)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fold(past: SessionHistory, event: Event) -> SessionHistory:
        after = right(past, event)
        return after if len(past.keys) < KEYS_MAX else replace(after, keys=past.keys)

    return fold


def _unlike(kind: str) -> Wrong:
    """A fold that ignores what this event kind says about questions."""

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def fold(past: SessionHistory, event: Event) -> SessionHistory:
            after = right(past, event)
            return replace(after, questions=past.questions) if event.kind == kind else after

        return fold

    return wrong


_mutant("a question stays with a turn that is over", pasts, "_fold", "a question")(_unlike(kinds.TURN_ENDED))
_mutant("an answered question is open", pasts, "_fold", "a question")(_unlike(kinds.QUESTION_ANSWERED))
_mutant(
    "a question outlives the log that lost its answer",
    pasts,
    "_fold",
    partial(_dies, "a question and a log that fails"),
)(_unlike(kinds.SESSION_STORE_RETURNED))


@_mutant("a limit is forgotten on replay", replaying, "_fold_session", "a limit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fold(state: Session, kind: str, body: dict[str, Any]) -> Session:
        return state if kind == kinds.LIMITS_CHANGED else right(state, kind, body)

    return fold


@_mutant("a limit is lost with a failed append", provider_limits, "log_limits", "a limit and a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def log_limits(work: Transition, *limits: Any, **how: Any) -> None:
        if not any(kind == kinds.SESSION_CONVERSATION for _, kind, _ in work.entries):
            right(work, *limits, **how)

    return log_limits


# -- waits for a limit -------------------------------------------------------------------------------------------------
@_mutant("an ask is asked again after a tool ran", limit_wait, "retry_of", "a wait for a limit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def retry_of(work: Transition, turn: Turn, outcome: Outcome) -> LimitWait | None:
        return right(work, replace(turn, used_tools=False), outcome)

    return retry_of


@_mutant("a wait ends before the reset", limit_wait, "expire", "a wait, told late")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def expire(work: Transition, _key: str) -> None:
        wait = work.state.limit_wait
        if wait is not None:
            right(work, wait.key)

    return expire


@_mutant("the limit of a requeued ask is forgotten on replay", replaying, "_limited_by", "a wait for a limit")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def limited_by(state: Session, _body: dict[str, Any]) -> Session:
        return state

    return limited_by


@_mutant("replay does not count how often an ask waited for a limit", replaying, "_again", "a wait for a limit")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def again(turn: Turn, body: dict[str, Any]) -> Turn:
        return replace(right(turn, body), limit_waits=turn.limit_waits)

    return again


def _as_if_free(right: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does not see the wait of the queue."""

    def wrong(work: Transition) -> None:
        wait = work.state.limit_wait
        work.set(limit_wait=None)
        right(work)
        work.set(limit_wait=wait)

    return wrong


_mutant("an ask preempts and cannot be sent", grants, "_make_room", "a wait, and another session")(_as_if_free)
_mutant("a granted turn ignores the limit", grants, "_write_prompt", "a wait, and a host that dies")(_as_if_free)
_mutant(
    "a process is started while the queue waits",
    grants,
    "_grant",
    test_limit_wait.test_nothing_is_sent_and_no_process_started_during_a_wait,
)(_as_if_free)
_mutant(
    "a process waits for its place although the queue waits",
    grants,
    "_give_up_start",
    test_limit_wait.test_waiting_start_of_a_process_is_given_up,
)(_as_if_free)


@_mutant("a wait never begins again after a restart", limit_wait, "look", test_limit_wait.test_wait_survives_the_host)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def look(work: Transition) -> None:
        if work.state.head > work.state.committed or work.entries:
            right(work)

    return look


@_mutant("a wait has no end", limit_wait, "expire", "a wait, held")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def nothing(work: Transition, key: str) -> None:
        pass

    return nothing


@_mutant(
    "an answer from before the limit lifts it for others",
    limit_wait,
    "on_outcome",
    test_limit_wait.test_turn_that_began_before_the_limit_does_not_lift_it_for_others,
)
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def on_outcome(work: Transition, turn: Turn, outcome: Outcome) -> None:
        right(work, replace(turn, limited_until=work.state.limited_until), outcome)

    return on_outcome


# -- fall-backs ------------------------------------------------------------------------------------------------------
@_mutant("an ask that was sent goes to a fall-back", fallback, "choose", "a fall-back, preempted")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def choose(state: Session, turn: Turn) -> str:
        return right(state, replace(turn, agent=None))

    return choose


@_mutant("the agent changes within a turn", fallback, "watch_limits", "a fall-back")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def watch_limits(work: Transition) -> None:
        right(work)
        state = work.state
        others = [each.agent for each in state.config.roster if each.agent != fallback.current(state)]
        if others and fallback.is_limited(state, fallback.current(state)):
            fallback.switch(work, others[0])

    return watch_limits


@_mutant("one agent resumes the conversation of another", fallback, "switched", "a fall-back")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def switched(state: Session, before: str, agent: str) -> Session:
        after = right(state, before, agent)
        return replace(after, conversation=after.conversation or state.conversation)

    return switched


@_mutant("a fall-back is forgotten on replay", replaying, "_fold_session", "a fall-back")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def fold(state: Session, kind: str, body: dict[str, Any]) -> Session:
        return state if kind == kinds.SESSION_FELL_BACK else right(state, kind, body)

    return fold


@_mutant("a fall-back is lost with a failed append", fallback, "log_change", "a fall-back, and a log that fails")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def log_change(work: Transition, before: str, agent: str, why: str, until: float | None) -> None:
        if why != "return":
            right(work, before, agent, why, until)

    return log_change


@_mutant("an agent serves again before its reset", fallback, "on_reset", "a fall-back, and the account")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def on_reset(work: Transition, _key: str) -> None:
        over = tuple(replace(limit, is_over=True) for limit in work.state.agent_limits)
        work.set(agent_limits=over)

    return on_reset


@_mutant("a limited agent serves although another is free", fallback, "choose", "a fall-back")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def choose(state: Session, _turn: Turn) -> str:
        return fallback.current(state)

    return choose


@_mutant(
    "an ask that waits for one agent blocks the others",
    fallback,
    "servable",
    test_fallback.test_ask_that_waits_for_one_agent_does_not_block_others,
)
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def servable(_state: Session, queue: Queue) -> Queue:
        return queue

    return servable


@_mutant("a missing agent is started forever", fallback, "notice_missing", "a fall-back of a missing agent")
def _(_right: Callable[..., Any]) -> Callable[..., Any]:
    def notice_missing(_work: Transition, error: BanksmanError) -> bool:
        return isinstance(error, ProgramNotFound)

    return notice_missing


# -- hand-over -------------------------------------------------------------------------------------------------------
@_mutant("the next host does not get the open turn", live_state, "encode", "a hand-over")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(state: Session) -> Any:
        encoded = right(state)
        del encoded["fields"]["turn"]
        return encoded

    return wrong


@_mutant("the next host repeats the prompt", live_state, "frozen", "a hand-over")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(state: Session) -> Session:
        held = right(state)
        if held.turn is None or held.turn.phase is not TurnPhase.RUNNING:
            return held
        return replace(held, turn=replace(held.turn, phase=TurnPhase.STARTING, may_write=True))

    return wrong


@_mutant("a process is handed over in the middle of a frame", hand_over, "may_hand_over", "a hand-over")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(state: Session) -> Any:
        return right(replace(state, process=replace(state.process, stdin=Stdin.FREE)))

    return wrong


@_mutant("a session leaves with effects that wait for its log", hand_over, "may_hand_over", "a hand-over")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(state: Session) -> Any:
        return right(replace(state, deferred=()))

    return wrong


@_mutant("nobody tells the callers of a turn that it goes on elsewhere", hand_over, "_leave", "a hand-over")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(work: Transition, fact: Any) -> None:
        right(work, fact)
        work.set(deferred=tuple(pair for pair in work.state.deferred if isinstance(pair[1], Finish)))

    return wrong


@_mutant("the question about a budget ends with the old host", budget_gate, "_ask_or_withdraw", "a budget that asks")
def _(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(work: Transition, caps: tuple[CapUse, ...]) -> None:
        if work.state.mode is Mode.HANDING:
            budget_gate.withdraw(work, "budget")
        else:
            right(work, caps)

    return wrong


def _frozen_without(**lost: Any) -> Wrong:
    """Return a `frozen` that loses fields of the session, or of its turn (`turn_…`)."""
    of_turn = {name.removeprefix("turn_"): value for name, value in lost.items() if name.startswith("turn_")}
    of_session = {name: value for name, value in lost.items() if not name.startswith("turn_")}

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def frozen(state: Session) -> Session:
            held = replace(right(state), **of_session)
            return held if held.turn is None else replace(held, turn=replace(held.turn, **of_turn))

        return frozen

    return wrong


for _name, _scenario, _lost in (
    ("the next host does not wait for the limit", "a hand-over, and a wait", {"limit_wait": None}),
    ("the next host does not know the limit", "a hand-over, and the account", {"limited_until": None}),
    ("the next host forgets that a tool runs", "a hand-over, and a wait", {"turn_used_tools": False}),
    ("the next host returns to the first agent", "a hand-over, and a fall-back", {"agent": "one"}),
    ("the next host counts the budget anew", "a hand-over, and a budget", {"used": NO_USAGE}),
    ("the next host forgets the answer about the budget", "a budget that asks", {"is_budget_answered": False}),
    ("the next host forgets the shared caps", "a shared budget that asks", {"shared": ()}),
    ("the next host forgets an open question", "a hand-over, and a question with a time", {"questions": ()}),
):
    _mutant(_name, live_state, "frozen", _scenario)(_frozen_without(**_lost))
