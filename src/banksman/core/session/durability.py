"""React to commits and failures of the session's log.

A commit releases the effects that waited for it. A failed append ends all open asks and the agent's
process. The endings of these asks are appended again with backoff, unless another host owns the
session now. `sessions/log_writer.py` writes the log.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver
from banksman.core.session import (
    asks,
    budget_gate,
    fallback,
    provider_limits,
    questions,
    shutdown,
    turn_end,
    turn_log,
    turn_usage,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import (
    Accept,
    Append,
    EndHold,
    Finish,
    GiveReceipt,
    Reject,
    Resolve,
    SettingTaken,
    TellAnswer,
)
from banksman.core.session.event import Entry, entry
from banksman.core.session.facts import AppendFailed, Timer
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.core.session.state import OVER, AgentTurnEnded, MaySteer, MayWrite, Session, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase
from banksman.core.session.usage import NO_USAGE, Counted, Usage
from banksman.errors import BanksmanError


def count(state: Session, seq: int) -> Session:
    """Record a commit that no effect waits for: `commit` and its step would change nothing else."""
    return replace(state, committed=max(seq, state.committed))


def commit(work: Transition, seq: int) -> None:
    """Record that the log is durable up to `seq`, and release the effects that waited for that."""
    state = work.state
    if seq <= state.committed:
        return
    released = [deferred for at, deferred in state.deferred if at <= seq]
    work.set(committed=seq, deferred=tuple(pair for pair in state.deferred if pair[0] > seq))
    if state.store is Store.BROKEN:
        # The pending endings are written: the store works again, and this host is still the writer.
        work.set(store=Store.WORKING, store_error=None, store_retries=0, unwritten=())
        _log_again(work)
        budget_gate.log_again(work)
    for deferred in released:
        match deferred:
            case MayWrite(key=key):
                turn = work.state.turn
                if turn is not None and turn.key == key and turn.phase is TurnPhase.STARTING:
                    work.set_turn(replace(turn, may_write=True))
            case MaySteer(key=key, ask=ask):
                asks.send_steered(work, key, ask)
            case AgentTurnEnded() | Counted():
                pass
            case _:
                work.do(deferred)


def _log_again(work: Transition) -> None:
    """Log again what describes the agents: earlier events about it may have been lost.

    That is the conversation, its cost, its settings and the limits of the account. With several
    agents, a change to each comes before its state.
    """
    state = work.state
    for agent, known in fallback.states(state):
        if state.agent is None and known is not state:
            # It never served. Another session of its account met a limit.
            provider_limits.log_limits(work, known.limits, known.limited_until, agent=agent)
            continue
        if state.agent is not None:
            first = fallback.first(state).agent
            fallback.log_change(work, first, agent, "return", known.limited_until)
        # The endings that were appended first may have stored the cost of another agent.
        told = {"conversation": known.conversation, "spent": known.spent}
        work.log(None, kinds.SESSION_CONVERSATION, **told)
        for name, value in known.settings:
            work.log(None, kinds.SESSION_SETTING, name=name, value=value, by="return")
        provider_limits.log_limits(work, known.limits, known.limited_until)


def fail(work: Transition, fact: AppendFailed) -> None:
    """Handle a failed append."""
    if shutdown.has_gone(work.state):
        return  # The session has left this host, so the failure affects nothing here.
    # `session.left` is not in the log, so the session has not left.
    shutdown.take_back(work)
    state = work.state
    error = fact.error
    if state.store is Store.WORKING:
        # If another host owns the session now, its log says how each ask ends. Here that is
        # unknown.
        _lose_store(work, Kind.UNKNOWN if fact.is_final else Kind.FAILED, error)
    if fact.is_final:
        work.set(store=Store.LOST, store_error=error, unwritten=())
        return
    if work.state.mode in OVER:
        return  # The session is over, so no part of it can retry.
    retries = work.state.store_retries + 1
    limit = state.config.store_retry_seconds_max
    seconds = min(state.config.store_retry_seconds * 2.0 ** min(retries - 1, 16), limit)
    # The failed retry had placed the endings after the durable events. They are not in the log.
    work.set(store_retries=retries, head=work.state.committed)
    work.start_timer(seconds, Timer.STORE, str(retries))


def _lose_store(work: Transition, kind: Kind, error: BanksmanError) -> None:
    """End every open ask and the agent, because nothing further is durable.

    Without a log there is no proof of the agent's actions.
    """
    state = work.state
    lost = _lost_usage(work)
    work.set(store=Store.BROKEN, store_error=error, head=state.committed, deferred=())
    outcome = Outcome(kind=kind, error=error, durable=False)
    unaccepted = [deferred.turn for _, deferred in state.deferred if isinstance(deferred, Accept)]
    ended = [deferred for _, deferred in state.deferred if isinstance(deferred, Resolve)]
    for turn in unaccepted:
        work.do(Reject(turn, error))
    # These asks had an outcome that is not durable. Their callers get `kind` and the error instead.
    for resolve in ended:
        if resolve.turn not in unaccepted:
            turn_log.log_ended(work, resolve.turn, outcome, By.EXIT)
            ended_so = dataclasses.replace(resolve.outcome, kind=kind, error=error, durable=False)
            work.do(Resolve(resolve.turn, ended_so))
    for _, deferred in state.deferred:
        if isinstance(deferred, GiveReceipt | Finish):
            work.do(deferred)
        elif isinstance(deferred, SettingTaken):
            work.do(SettingTaken(deferred.change, error))
        elif isinstance(deferred, TellAnswer):
            work.do(replace(deferred, error=error))
            questions.reopen(work, deferred.question)
    turns = [
        *(waiting for waiting in state.queue if isinstance(waiting, Turn)),
        *([state.turn] if state.turn else []),
    ]
    for turn in turns:
        for ask in turn.asks:
            turn_end.forget_deadline(work, ask)
            if ask.id not in unaccepted:
                turn_log.log_ended(work, ask.id, outcome, By.EXIT)
                work.do(Resolve(ask.id, outcome))
    for turn in (state.turn, state.own):
        for interrupt in () if turn is None else turn.interrupts:
            work.do(GiveReceipt(interrupt, Receipt(stopped=True, by=By.LADDER)))
    for hold in (state.hold, *(waiting for waiting in state.queue if isinstance(waiting, Hold))):
        if hold is not None:
            work.do(EndHold(hold.id, error))
    own = [deferred for _, deferred in state.deferred if isinstance(deferred, AgentTurnEnded)]
    for over in (
        *own,
        *(() if state.own is None else (AgentTurnEnded(state.own.id, state.own.seq),)),
    ):
        # If the start of the turn is in the log, its end must be written too, or the turn stays
        # open.
        if over.seq <= state.committed:
            turn_log.log_ended(work, over.turn, outcome, By.EXIT)
    work.set(unwritten=(*lost, *work.state.unwritten))
    work.set(queue=(), collecting=(), hold=None, turn=None, own=None, clocks=())
    # The process must stop even if the store recovers: the log cannot account for what it did
    # meanwhile.
    work.stop_process()
    work.set_process(tasks=())
    questions.lose_all(work)
    budget_gate.withdraw(work, "store")


def _lost_usage(work: Transition) -> list[Entry]:
    """Return entries with the usage that the log does not have.

    - One for each caller, without a turn: it was in events that are not durable.
    - One for each turn that is open now. No event had this usage.
    """
    state = work.state
    sums: dict[tuple[str | None, str | None], Usage] = {}
    rest: list[Entry] = []
    for _, deferred in state.deferred:
        if isinstance(deferred, Counted):
            owner = deferred.caller, deferred.used_by
            sums[owner] = sums.get(owner, NO_USAGE).plus(deferred.added)
    for turn in (state.own, state.turn):
        used = None if turn is None else turn_usage.final(turn, TurnOver(), work.at)
        if turn is not None and used is not None:
            caller, added = turn_usage.caller_of(turn), used.minus(turn.meter.logged)
            if turn.is_own and turn.seq > state.committed:
                # The log has lost the start of the turn, and must not have its other events.
                owner = caller, state.agent
                sums[owner] = sums.get(owner, NO_USAGE).plus(added)
            else:
                told = {"caller": caller, "used_by": state.agent, "added": added, "used": used}
                rest.append(entry(turn.id, kinds.USAGE_REPORTED, **told))
            work.set(used=work.state.used.plus(added))
    repeated = [
        entry(None, kinds.USAGE_REPORTED, caller=caller, used_by=agent, added=added, used=added)
        for (caller, agent), added in sums.items()
    ]
    return [*repeated, *rest]


def retry(work: Transition) -> None:
    """Append the pending endings again."""
    state = work.state
    # The append is never empty: the outage itself deserves an event.
    note = entry(None, kinds.SESSION_STORE_RETURNED, retries=state.store_retries)
    entries = (*state.unwritten, note)
    work.set(head=state.committed + len(entries))
    work.do(Append(entries))
    # This append counts the usage of the turns that were open. Another retry only repeats it.
    work.set(
        unwritten=tuple(
            (None if kind == kinds.USAGE_REPORTED else turn, kind, data)
            for turn, kind, data in state.unwritten
        )
    )
