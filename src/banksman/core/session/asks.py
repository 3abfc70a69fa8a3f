"""Handle callers' requests: ask, steer, withdraw, interrupt, move, edit, hold, answer.

An ask is accepted into the queue or into the running turn, or rejected. `grants.py` grants the
queued asks and holds, and sends the prompts of turns. This module sends only steered prompts.
Changes of settings are in `settings.py`. Drain, close and leave are in `shutdown.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import PromptRefused
from banksman.core.session import (
    ask_queue,
    budget_gate,
    fallback,
    limit_wait,
    questions,
    turn_end,
    watchdogs,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold, Queue
from banksman.core.session.effects import (
    Accept,
    EndHold,
    GiveReceipt,
    Reject,
    SettingTaken,
    StartTimer,
)
from banksman.core.session.facts import (
    AskEdited,
    AskMoved,
    InterruptAsked,
    LimitDecided,
    QuestionAnswered,
    Timer,
)
from banksman.core.session.outcome import By, Kind, Receipt
from banksman.core.session.state import (
    MaySteer,
    Mode,
    ProcessPhase,
    PromptNaming,
    Session,
    Store,
    not_open,
)
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Ask, Cause, Turn, TurnPhase, queued
from banksman.core.session.turn_usage import caller_of
from banksman.errors import BanksmanError, Busy, QueueFull, Refused


def ask(work: Transition, ask: Ask) -> None:
    """Accept an ask into the queue or the running turn, or reject it."""
    state = work.state
    # First, because the class decides whether the queue has room for the ask.
    ask = _as_held(state, ask)
    refusal = _refusal(state, ask)
    if refusal is not None:
        work.do(Reject(ask.id, refusal))
        return
    if state.hold is not None and ask.hold == state.hold.id:
        work.watch_hold()
    if ask.on_busy == "steer" and state.config.dialect.can_steer and _steer(work, ask):
        return
    _make_place(work, ask)
    queue = work.state.queue
    leader = _leader(state, queue, ask)
    _log_queued(work, ask, leader)
    if leader is not None:
        work.set(queue=ask_queue.join(queue, leader.id, ask))
    else:
        work.set(queue=ask_queue.enqueue(queue, queued(ask)))
        if ask.on_busy == "collect":
            work.set(collecting=(*work.state.collecting, ask.id))
            work.start_timer(state.config.collect_seconds, Timer.COLLECT, ask.id)
    work.after_commit(Accept(ask.id))
    if ask.on_busy == "interrupt" and not _is_held(work, ask, ask.caller):
        _interrupt_for(work, ask)


def _is_held(work: Transition, ask: Ask, caller: str | None) -> bool:
    """Whether an ask must wait now: for a hold, a budget of this caller or a limit of the account.

    Such an ask is not steered into the running turn, and does not interrupt it.
    """
    if not ask_queue.passes(queued(ask), work.state.hold):
        return True
    is_over_budget = budget_gate.is_held(work.state, caller, work.at)
    return is_over_budget or limit_wait.wait_of(work.state, queued(ask)) is not None


def _leader(state: Session, queue: Queue, ask: Ask) -> Turn | None:
    """Return the waiting turn that collects this ask."""
    leader = ask_queue.leader(queue, ask) if ask.on_busy == "collect" else None
    return leader if leader is not None and _may_share(state, leader, ask) else None


def _may_share(state: Session, turn: Turn, ask: Ask) -> bool:
    """Whether an ask may be part of a turn of other asks.

    If callers have budgets, asks of two callers do not share a turn: one budget would pay for both.
    """
    return not state.config.shares_budget or caller_of(turn) == ask.caller


def _as_held(state: Session, ask: Ask) -> Ask:
    """Give an ask the class of its hold, also while the hold itself waits for a more urgent entry.

    An ask of a hold that has ended keeps its own class.
    """
    if ask.hold is None:
        return ask
    holds = (state.hold, *(waiting for waiting in state.queue if isinstance(waiting, Hold)))
    hold = next((hold for hold in holds if hold is not None and hold.id == ask.hold), None)
    return replace(ask, hold=None) if hold is None else replace(ask, priority=hold.priority)


def _refusal(state: Session, ask: Ask) -> BanksmanError | None:
    if state.store is not Store.WORKING:
        assert state.store_error is not None
        return state.store_error
    if state.mode is not Mode.OPEN:
        return not_open(state, turn=ask.id)
    if (
        ask.on_busy == "reject"
        and state.is_busy
        and (state.hold is None or ask.hold != state.hold.id)
    ):
        return Busy("the session is busy", hint='use on_busy="enqueue" to wait', turn=ask.id)
    # A fall-back that cannot steer queues the ask.
    assert ask.on_busy != "steer" or fallback.first(state).dialect.can_steer, (
        "the shell refuses to steer an agent that cannot"
    )
    if ask_queue.count(state.queue) >= state.config.queue_max and _dispensable(state, ask) is None:
        message = f"the queue is full: {state.config.queue_max} asks are waiting"
        return QueueFull(message, hint="try again later", turn=ask.id)
    return None


def _dispensable(state: Session, ask: Ask) -> Turn | None:
    return (
        ask_queue.dispensable(state.queue, ask.priority)
        if state.config.when_full == "drop"
        else None
    )


def _make_place(work: Transition, ask: Ask) -> None:
    state = work.state
    if ask_queue.count(state.queue) >= state.config.queue_max:
        dropped = _dispensable(state, ask)
        assert dropped is not None
        error = QueueFull("the queue is full, and a more urgent ask came")
        drop(work, dropped, Kind.REFUSED, error)


def _log_queued(work: Transition, ask: Ask, leader: Turn | None = None) -> None:
    """Log the ask, and start its deadline."""
    work.log(
        ask.id,
        kinds.TURN_QUEUED,
        ref=ask.ref,
        prompt=ask.prompt,
        priority=ask.priority,
        on_busy=ask.on_busy,
        on_preempt=ask.on_preempt,
        key=ask.key,
        rules=ask.rules,
        schema=ask.schema,
        is_last=ask.is_last,
        into=None if leader is None else leader.id,
        deadline=ask.deadline,
        caller=ask.caller,
        **({} if ask.trace is None else {"trace": ask.trace}),
    )
    if ask.due is not None:
        work.do(StartTimer(ask.due, (Timer.DEADLINE, ask.id)))


def _steer(work: Transition, ask: Ask) -> bool:
    """Add a prompt to the running turn, if a turn runs that can take it."""
    state = work.state
    turn = state.turn
    if turn is None or not _takes_prompts(state, turn):
        return False
    if not _may_share(state, turn, ask):
        return False
    if _is_held(work, ask, ask.caller):
        return False  # It waits, as every ask does then.
    _log_queued(work, ask)
    work.log(ask.id, kinds.TURN_STARTED, into=turn.id, attempt=1)
    work.set_turn(replace(turn, steered=(*turn.steered, ask), unsent=(*turn.unsent, ask.id)))
    work.after_commit(Accept(ask.id))
    work.after_commit(MaySteer(turn.key, ask.id))
    return True


def send_steered(work: Transition, key: str, id: str) -> None:
    """Send a steered prompt, now that its intent is durable, if the turn still takes it.

    Otherwise the prompt waits for the end of the turn and becomes an ordinary ask then.
    """
    turn = work.state.turn
    if (
        turn is None
        or turn.key != key
        or id not in turn.unsent
        or not _takes_prompts(work.state, turn)
    ):
        return
    ask = next(ask for ask in turn.steered if ask.id == id)
    if _is_held(work, ask, caller_of(turn)):
        return
    work.set_turn(replace(turn, unsent=tuple(other for other in turn.unsent if other != id)))
    work.speak(
        turn.id, lambda protocol: protocol.prompt(ask.ref, ask.prompt), PromptRefused(ask.ref)
    )


def _takes_prompts(state: Session, turn: Turn) -> bool:
    """Whether the turn takes another prompt while it runs.

    An agent that does not name prompts takes none. It may begin with the added prompt only after
    the turn. Its answer would then be mistaken for the answer to the next prompt.
    """
    is_running = turn.phase is TurnPhase.RUNNING and turn.boundary is None and turn.settled is None
    process = state.process
    is_there = process.phase is ProcessPhase.READY and process.naming is PromptNaming.PRESENT
    return is_running and is_there and state.own is None


def _interrupt_for(work: Transition, ask: Ask) -> None:
    """Interrupt the running turns, because the ask demands it.

    Preemption by a more urgent class happens in `grants`, where the next turn is chosen.
    """
    for turn in (work.state.own, work.state.turn):
        if turn is not None and ask_queue.may_interrupt(ask.priority, turn.priority):
            turn_end.stop(work, turn, Cause.INTERRUPT, caller=ask.caller)


def withdraw(work: Transition, id: str) -> None:
    """End an ask whose caller has withdrawn it."""
    if _withdraw_queued(work, id):
        return
    turn = work.state.turn
    if turn is not None and any(ask.id == id for ask in turn.asks):
        # One of several asks of a turn may be withdrawn. The other callers still want the turn, and
        # the withdrawn ask shares its outcome.
        work.set_turn(replace(turn, unwanted=(*turn.unwanted, id)))
        turn_end.stop_if_unwanted(work)


def resume_deadlines(work: Transition) -> None:
    """Start the deadlines of the asks that waited when the session got this owner."""
    turns = [waiting for waiting in work.state.queue if isinstance(waiting, Turn)]
    for ask in [ask for turn in turns for ask in turn.asks]:
        if ask.due is not None and ask.due <= work.at:
            expire(work, ask.id)
        elif ask.due is not None:
            work.do(StartTimer(ask.due, (Timer.DEADLINE, ask.id)))


def expire(work: Transition, id: str) -> None:
    """End an ask at its deadline: withdraw it from the queue, or stop its turn.

    A turn of several asks is stopped only once none of them is wanted, as in `withdraw`. The error
    of an ask that waited for a limit of the account says so.
    """
    waiting = ask_queue.find(work.state.queue, id)
    wait = None if waiting is None else limit_wait.wait_of(work.state, waiting)
    error = None if wait is None else limit_wait.error_of(wait)
    if _withdraw_queued(work, id, clock=watchdogs.DEADLINE, error=error):
        return
    turn = work.state.turn
    if turn is not None and any(ask.id == id for ask in turn.asks):
        work.set_turn(replace(turn, unwanted=(*turn.unwanted, id)))
        turn_end.stop_if_unwanted(work, Cause.CLOCK, watchdogs.DEADLINE)


def _withdraw_queued(
    work: Transition,
    id: str,
    *,
    clock: str | None = None,
    error: BanksmanError | None = None,
    caller: str | None = None,
) -> bool:
    turn = ask_queue.find(work.state.queue, id)
    if turn is None:
        return _withdraw_unsent(work, id, clock, caller)
    ask = next(ask for ask in turn.asks if ask.id == id)
    rest = tuple(other for other in turn.asks if other is not ask)
    if rest:
        # One of several collected asks: the turn continues with the others, under the id of the
        # first.
        first, *others = rest
        kept = replace(turn, id=first.id, ask=first, joined=tuple(others))
        work.set(
            queue=tuple(kept if waiting is turn else waiting for waiting in work.state.queue),
            collecting=tuple(
                first.id if other == turn.id else other for other in work.state.collecting
            ),
        )
        if first.id in work.state.collecting:
            work.start_timer(work.state.config.collect_seconds, Timer.COLLECT, first.id)
    else:
        take_out(work, turn)
    turn_end.end_queued(work, ask, Kind.WITHDRAWN, clock=clock, error=error, caller=caller)
    return True


def _withdraw_unsent(work: Transition, id: str, clock: str | None, caller: str | None) -> bool:
    """Withdraw a steered ask whose prompt is not sent yet: it has left the queue."""
    turn = work.state.turn
    if turn is None or id not in turn.unsent:
        return False
    ask = next(ask for ask in turn.steered if ask.id == id)
    steered = tuple(other for other in turn.steered if other is not ask)
    work.set_turn(
        replace(turn, steered=steered, unsent=tuple(other for other in turn.unsent if other != id))
    )
    turn_end.end_queued(work, ask, Kind.WITHDRAWN, clock=clock, caller=caller)
    return True


def take_out(work: Transition, turn: Turn | Hold) -> None:
    """Remove an entry from the queue."""
    work.set(
        queue=ask_queue.remove(work.state.queue, turn.id),
        collecting=tuple(other for other in work.state.collecting if other != turn.id),
    )


def drop(work: Transition, turn: Turn, kind: Kind, error: BanksmanError) -> None:
    """Remove a turn from the queue, and end its asks."""
    take_out(work, turn)
    for ask in turn.asks:
        turn_end.end_queued(work, ask, kind, error=error)


def decide_limit(work: Transition, fact: LimitDecided) -> None:
    """End the asks that wait for a limit of the account, if the caller decided so."""
    wait = limit_wait.give_up(work, fact.key) if fact.fails else None
    if wait is not None:
        for turn in [turn for turn in work.state.queue if isinstance(turn, Turn)]:
            drop(work, turn, Kind.FAILED, limit_wait.error_of(wait))


def interrupt(work: Transition, fact: InterruptAsked) -> None:
    """Interrupt a turn, or withdraw its ask if it is still queued. The caller gets a receipt."""
    state, id, interrupt = work.state, fact.turn, fact.interrupt
    if _withdraw_queued(work, id, caller=fact.caller):
        ids = tuple(
            ask.id for waiting in state.queue if isinstance(waiting, Turn) for ask in waiting.asks
        )
        receipt = Receipt(
            stopped=True, by=By.WITHDRAWN, queued=tuple(other for other in ids if other != id)
        )
        work.after_commit(GiveReceipt(interrupt, receipt))
        return
    for turn in (state.own, state.turn):
        if turn is not None and (turn.id == id or any(ask.id == id for ask in turn.asks)):
            # If the ask was steered into the turn, the agent may not have begun with its prompt.
            # That prompt must not run after the turn.
            noted = replace(
                turn, interrupts=(*turn.interrupts, interrupt), unwanted=(*turn.unwanted, id)
            )
            work.set_turn(noted)
            turn_end.stop(work, noted, Cause.INTERRUPT, caller=fact.caller)
            return
    work.do(GiveReceipt(interrupt, Receipt(stopped=False, by=By.ALREADY_OVER)))


def move(work: Transition, fact: AskMoved) -> None:
    """Move a queued turn within its class, and log the change."""
    queue = ask_queue.move(work.state.queue, fact.turn, fact.before)
    if queue != work.state.queue:
        work.set(queue=queue)
        work.log(fact.turn, kinds.QUEUE_CHANGED, before=fact.before, **kinds.named(fact.caller))


def edit(work: Transition, fact: AskEdited) -> None:
    """Change the prompt or the class of a queued ask and log the change, or refuse it.

    An ask can be edited until its first grant. Afterwards the agent may have its prompt, and a
    requeued turn repeats that one.
    """
    refusal = _edit_refusal(work.state, fact)
    if refusal is not None:
        work.do(SettingTaken(fact.change, refusal))
        return
    work.set(queue=ask_queue.edit(work.state.queue, fact.turn, fact.prompt, fact.priority))
    told = {"prompt": fact.prompt, "priority": fact.priority, "caller": fact.caller}
    work.log(fact.turn, kinds.TURN_EDITED, **told)
    work.after_commit(SettingTaken(fact.change))


def _edit_refusal(state: Session, fact: AskEdited) -> BanksmanError | None:
    if state.store is not Store.WORKING:
        return state.store_error
    # The next owner of a session that leaves has its queue as the log has it now.
    if state.mode is not Mode.OPEN:
        return not_open(state, turn=fact.turn)
    message = f"cannot edit turn {fact.turn}"
    turn = ask_queue.find(state.queue, fact.turn)
    if turn is None or turn.attempt > 1:
        why = "it is not queued" if turn is None else "the agent may have its prompt"
        return Refused(f"{message}: {why}", hint="interrupt it, and ask again", turn=fact.turn)
    is_of_hold = any(ask.hold is not None for ask in turn.asks)
    if fact.priority is not None and (is_of_hold or len(turn.asks) > 1):
        why = "its hold has the priority" if is_of_hold else "other asks share its turn"
        hint = "leave its priority, or interrupt it and ask again"
        return Refused(f"{message}: {why}", hint=hint, turn=fact.turn)
    return None


def hold(work: Transition, hold: Hold) -> None:
    """Put a hold into the queue, or refuse it."""
    if not work.is_open:
        work.do(EndHold(hold.id, not_open(work.state)))
    elif work.state.store is not Store.WORKING:
        work.do(EndHold(hold.id, work.state.store_error))
    elif (
        sum(isinstance(waiting, Hold) for waiting in work.state.queue)
        >= work.state.config.queue_max
    ):
        message = f"the queue is full: {work.state.config.queue_max} holds are waiting"
        work.do(EndHold(hold.id, QueueFull(message, hint="try again later")))
    else:
        work.set(queue=ask_queue.enqueue(work.state.queue, hold))


def release(work: Transition, id: str, caller: str | None) -> None:
    """End a granted hold, or remove a waiting one from the queue."""
    if work.state.hold is not None and work.state.hold.id == id:
        work.cancel_timer(Timer.HOLD, f"{id}#{work.state.hold_asks}")
        work.end_hold("released", caller=caller)
    else:
        work.set(queue=tuple(w for w in work.state.queue if not isinstance(w, Hold) or w.id != id))


def answer(work: Transition, fact: QuestionAnswered) -> None:
    """Answer a question. If the answer demands it, interrupt the turn as well."""
    about_budget = work.state.budget_question
    if about_budget is not None and about_budget.id == fact.question:
        budget_gate.answer(work, fact.decision)
        return
    question = questions.answer(work, fact.question, fact.decision)
    if question is None or not fact.decision.interrupts:
        return
    # The answer itself also demands the interrupt. But only an interrupt has a deadline and counts
    # as an interrupt for every observer.
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.id == question.turn:
            turn_end.stop(work, turn, Cause.INTERRUPT, caller=fact.decision.caller)
