"""Apply budgets to a session: warn, grant no turn while a cap is reached, stop or ask.

A cap is either the session's own, over its whole life, or one that the sessions of a host share:
see `sessions/budgets.py`. The session counts its own usage (`Session.used`) from what it logs, so
that a replay of the log counts the same. `look` runs after every fact and after each usage report.

- At 80 % of a cap: the event `budget.warning`, once per cap.
- At the cap: the event `budget.exceeded`. No turn is granted from then on, and waiting asks wait. A
  cap of a caller holds back only the asks of that caller.
- `on_budget` decides about the running turn. "queue": it finishes. "stop": it is stopped by the
  ladder. "ask": it continues, and a person is asked: raise the budget, let the turn finish, or stop
  it. Only an explicit "raise" raises: a callback that allows everything must not. A cap on turns
  stops no running turn.

A larger budget opens the gate again, and so does the next day for a shared cap. No agent reports
its working time, so a timer compares that with its cap.

**Claims.** Two sessions could both grant the last turn of a shared budget. So each granted turn
claims its part from the host (`ClaimBudget`), and its prompt is sent only after the host agreed. A
turn that may not spend waits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.dialect import Decision
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session import budget as budgets
from banksman.core.session import event as kinds
from banksman.core.session import questions, turn_end
from banksman.core.session.ask_queue import Hold, Queue
from banksman.core.session.budget import FINISH, RAISE, STOP, Budget, CapUse, RaisedBudget
from banksman.core.session.effects import AskHuman, ClaimBudget, CloseQuestion, TellAnswer
from banksman.core.session.facts import (
    BudgetChanged,
    BudgetClaimed,
    BudgetFact,
    BudgetWarned,
    Timer,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.state import KEEPING, OVER, AgentRequest, Session, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Cause, Turn, TurnPhase
from banksman.core.session.turn_usage import caller_of
from banksman.core.session.usage import Usage

# `Outcome.clock` of a turn that was stopped because a budget was used up.
CLOCK = "budget"
_SUBJECT = "session"
# The timer is not restarted for a smaller difference.
_TIMER_SECONDS = 1e-3


# -- queries ---------------------------------------------------------------------------------------
def budget_of(state: Session) -> Budget | None:
    """Return the session's own budget, raised or as it was configured."""
    raised, budget = state.raised, state.config.budget
    return raised.budget if raised is not None and raised.base == budget else budget


def own_uses(state: Session, at: float) -> tuple[CapUse, ...]:
    """Return the use of the session's own caps, with the working time until now."""
    budget = budget_of(state)
    return () if budget is None else budgets.measure(budget, _used(state, at))


def _used(state: Session, at: float) -> Usage:
    used = state.used
    for turn in _open_turns(state):
        seconds = turn.meter.used(turn.began_at, at).working_seconds
        used = used.plus(Usage(working_seconds=seconds - turn.meter.logged.working_seconds))
    return used


def _open_turns(state: Session) -> list[Turn]:
    return [turn for turn in (state.own, state.turn) if turn is not None and turn.is_open]


def reached(state: Session, at: float) -> tuple[CapUse, ...]:
    """Return all caps that are reached, the session's own ones and the shared ones."""
    if state.config.budget is None:
        return state.shared
    return (*(use for use in own_uses(state, at) if use.is_reached), *state.shared)


def shared_holding(state: Session) -> tuple[CapUse, ...]:
    """Return the reached shared caps that concern an open or waiting turn of the session."""
    turns = [*_open_turns(state), *(turn for turn in state.queue if isinstance(turn, Turn))]
    callers = {caller_of(turn) for turn in turns}
    return tuple(use for use in state.shared if any(map(use.concerns, callers)))


def is_held(state: Session, caller: str | None, at: float) -> bool:
    """Whether no turn of this caller may be granted."""
    return budgets.held(reached(state, at), caller) is not None


def servable(state: Session, queue: Queue, at: float) -> Queue:
    """Return the queue without the turns that a budget holds back."""
    caps = reached(state, at)
    if not caps:
        return queue
    return tuple(
        waiting
        for waiting in queue
        if isinstance(waiting, Hold) or budgets.held(caps, caller_of(waiting)) is None
    )


def must_wait(work: Transition, turn: Turn) -> bool:
    """Whether a granted turn must wait again before its prompt is sent.

    The claim has decided about shared caps on turns: this turn itself may be their last one.
    """
    caps = reached(work.state, work.at)
    caps = tuple(use for use in caps if use.scope == "session" or use.stops_turns)
    return budgets.held(caps, caller_of(turn)) is not None


# -- facts -----------------------------------------------------------------------------------------
def claim(work: Transition, turn: Turn) -> Turn:
    """Claim a part of the shared budgets for a granted turn, if there are any."""
    if not work.state.config.shares_budget:
        return turn
    work.do(ClaimBudget(turn.key, caller_of(turn)))
    return replace(turn, may_spend=False)


def on_fact(work: Transition, fact: BudgetFact) -> None:
    """Handle a fact of the host's budgets. `look` does the rest."""
    match fact:
        case BudgetChanged(reached=caps):
            work.set(shared=caps)
        case BudgetWarned(use=use):
            _log(work, kinds.BUDGET_WARNING, use)
        case BudgetClaimed():
            _on_claimed(work, fact)


def _on_claimed(work: Transition, fact: BudgetClaimed) -> None:
    """Let a granted turn send its prompt, or put it back into the queue."""
    work.set(shared=fact.reached)
    turn = work.state.turn
    if turn is None or turn.key != fact.key or turn.phase is not TurnPhase.STARTING:
        return
    if fact.granted:
        work.set_turn(replace(turn, may_spend=True))
    else:
        held = budgets.held(fact.reached, caller_of(turn))
        assert held is not None, "without a reason, the turn would be granted again at once"
        turn_end.put_back(work, turn.requeued())


def _log(work: Transition, kind: str, use: CapUse) -> None:
    work.log(None, kind, **msgspec.structs.asdict(use))


# -- checks ----------------------------------------------------------------------------------------
def look(work: Transition) -> None:
    """Compare the usage with all caps, and act on those that are reached."""
    state = work.state
    # Without a budget, only one that is over may have left something to end.
    if not (
        state.config.budget is not None
        or state.shared
        or state.shared_told
        or state.is_budget_answered
        or state.budget_question is not None
        or state.budget_due is not None
    ):
        return
    if state.store is not Store.WORKING or state.mode in OVER:
        return
    own = own_uses(state, work.at)
    for use in own:
        if use.is_reached:
            _tell(work, kinds.BUDGET_EXCEEDED, use)
        elif use.is_near:
            _tell(work, kinds.BUDGET_WARNING, use)
    caps = (*(use for use in own if use.is_reached), *_tell_shared(work))
    if caps and state.config.on_budget == "stop":
        stop_turns(work, caps)
    _ask_or_withdraw(work, caps)
    _set_timer(work, own)


def _tell(work: Transition, kind: str, use: CapUse) -> None:
    """Log that a cap of the session is nearly or fully used, once for each cap."""
    told = (kind, use.unit, use.cap)
    if told not in work.state.told:
        _log(work, kind, use)
        work.set(told=budgets.with_told(work.state.told, told))


def _tell_shared(work: Transition) -> tuple[CapUse, ...]:
    """Log the shared caps that are reached and concern a turn of this session.

    Return these caps. An idle session logs nothing.
    """
    state = work.state
    caps = shared_holding(state)
    known = frozenset(map(_name, state.shared)) & frozenset(state.shared_told)
    for use in caps:
        if _name(use) not in known:
            _log(work, kinds.BUDGET_EXCEEDED, use)
    told = tuple(sorted({*known, *map(_name, caps)}, key=repr))
    if told != state.shared_told:
        work.set(shared_told=told)
    return caps


def _name(use: CapUse) -> tuple[str, str, str | None]:
    return use.scope, use.unit, use.caller


def stop_turns(work: Transition, caps: Iterable[CapUse]) -> None:
    """Stop the running turns that these caps concern."""
    caps = tuple(use for use in caps if use.stops_turns)
    for turn in _open_turns(work.state):
        # A turn that is being preempted stays preempted: it may wait again.
        if turn.phase is TurnPhase.RUNNING and budgets.held(caps, caller_of(turn)) is not None:
            turn_end.stop(work, turn, Cause.BUDGET, CLOCK)


def _set_timer(work: Transition, own: Iterable[CapUse]) -> None:
    """Start the timer for the next time at which the working time reaches a cap or its warning."""
    due = _due(work, own)
    before = work.state.budget_due
    if due is None:
        if before is not None:
            work.cancel_timer(Timer.BUDGET, _SUBJECT)
            work.set(budget_due=None)
    elif before is None or abs(due - before) > _TIMER_SECONDS:
        work.set(budget_due=due)
        work.start_timer(due - work.at, Timer.BUDGET, _SUBJECT)


def _due(work: Transition, own: Iterable[CapUse]) -> float | None:
    use = next((use for use in own if use.unit == "working_seconds"), None)
    running = [turn for turn in _open_turns(work.state) if turn.meter.asked_at is None]
    if use is None or use.is_reached or not running:
        return None
    limit = use.cap if use.is_near else use.cap * budgets.WARNING_PART
    return work.at + (limit - use.used) / len(running)


def on_timer(work: Transition) -> None:
    """Forget the timer that fired. `look` compares, and starts the next one."""
    work.set(budget_due=None)


# -- the question ----------------------------------------------------------------------------------
def _ask_or_withdraw(work: Transition, caps: tuple[CapUse, ...]) -> None:
    state = work.state
    # A session that leaves this host takes the question to its next one. So it stays one question,
    # also for a person who has read it here. See `kept`.
    is_due = bool(caps) and state.config.on_budget == "ask" and state.mode in KEEPING
    if not is_due:
        withdraw(work, "budget")
    if not caps:
        if state.is_budget_answered:
            work.set(is_budget_answered=False)
    elif is_due and state.budget_question is None and not state.is_budget_answered:
        _ask(work, caps[0])


def kept(past: SessionHistory) -> AgentRequest | None:
    """Return the question about the budget of a session that is taken over without its process.

    No process waits for the answer, so the next host can act on it as well. `look` withdraws the
    question if the budget is larger by then.
    """
    about = (question for question in past.questions if questions.is_about_budget(question))
    question = next(about, None)
    return (
        None if question is None else AgentRequest(question.id, None, questions.requested(question))
    )


def show(work: Transition) -> None:
    """Show the question again, under the session's new owner."""
    question = work.state.budget_question
    if question is not None:
        work.do(AskHuman(question.id, question.asked, None))


def _ask(work: Transition, use: CapUse) -> None:
    state = work.state
    # The name of a question has the epoch of its process: see questions.py. This question has no
    # process, and no process has the epoch 0. If the log loses the question, another one about the
    # budget may get the name, and an answer to the first one suits it too.
    id = f"q-0.{state.head + len(work.entries) + 1}"
    asked = Requested(
        request=id,
        wants=RequestPurpose.BUDGET,
        tool="budget",
        input=msgspec.structs.asdict(use),
        details={"title": f"over budget: {use.text}", "options": _options(use)},
    )
    work.set(budget_question=AgentRequest(id, None, asked))
    work.log(
        None,
        kinds.QUESTION_ASKED,
        question=id,
        request=id,
        wants=asked.wants,
        tool=asked.tool,
        input=asked.input,
        details=asked.details,
    )
    work.do(AskHuman(id, asked, None))


def _options(use: CapUse) -> list[Mapping[str, Any]]:
    more = {"optionId": RAISE, "name": "Raise the budget", "kind": "allow_always"}
    return [
        {"optionId": FINISH, "name": "Finish this turn, then wait", "kind": "allow_once"},
        # Only the configuration of the host can raise a shared cap.
        *((more,) if use.scope == "session" else ()),
        {"optionId": STOP, "name": "Stop this turn, then wait", "kind": "reject_once"},
    ]


def answer(work: Transition, decision: Decision) -> None:
    """Apply a person's answer to the question about the budget.

    The log gets the option that is applied, also if the answer names none. So the next host knows
    the answer, and does not ask again.
    """
    budget, base = budget_of(work.state), work.state.config.budget
    option = FINISH if decision.allows else STOP
    if decision.option == RAISE and base is not None:
        option = RAISE
    told = (decision.by, decision.message, option)
    _end(work, decision.word, *told, caller=decision.caller)
    if option == RAISE and budget is not None and base is not None:
        more = budgets.raised(base, budget, _used(work.state, work.at))
        work.set(raised=RaisedBudget(base, more))
        log_raised(work)
        return
    work.set(is_budget_answered=True)
    if not decision.allows:
        stop_turns(work, reached(work.state, work.at))


def log_raised(work: Transition) -> None:
    """Log the raised budget, if there is one."""
    if work.state.raised is not None:
        raised = work.state.raised
        work.log(None, kinds.BUDGET_RAISED, base=raised.base.caps, budget=raised.budget.caps)


def log_again(work: Transition) -> None:
    """Log everything about the budget again, because the log may have lost it."""
    log_raised(work)
    used = _used(work.state, work.at)
    for kind, unit, cap in work.state.told:
        _log(work, kind, CapUse("session", unit, budgets.amount(used, unit), cap))
    work.set(shared_told=())


def withdraw(work: Transition, by: str) -> None:
    """Withdraw the question, if it is open."""
    if work.state.budget_question is not None:
        _end(work, "withdrawn", by)


def _end(
    work: Transition,
    word: str,
    by: str,
    message: str | None = None,
    option: str | None = None,
    *,
    caller: str | None = None,
) -> None:
    question = work.state.budget_question
    assert question is not None
    work.set(budget_question=None)
    more = {} if option is None else {"option": option}
    work.log(
        None,
        kinds.QUESTION_ANSWERED,
        question=question.id,
        answer=word,
        by=by,
        message=message,
        **more,
        **kinds.named(caller),
    )
    work.do(CloseQuestion(question.id))
    work.after_commit(TellAnswer(question.id, word, by, message, caller=caller))
