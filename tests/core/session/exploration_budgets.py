"""Budgets in the exploration: an independent count of the usage, and the rules that hold for it.

A prompt is sent only while the session's own budget has something left, while no shared cap holds its caller back, and
after the host has agreed to the claim of its turn. With "stop", no turn goes on beyond the cap.
"""

from __future__ import annotations

from tests.core.session.ledger import Ledger, check

from banksman.core.dialects.dialect import DENIED, Decision
from banksman.core.session.budget import CapUse
from banksman.core.session.facts import Fact, QuestionAnswered
from banksman.core.session.session_config import Config
from banksman.core.session.state import KEEPING, Mode, Session
from banksman.core.session.turn import Turn, TurnPhase

RAISED = Decision(allows=True, option="raise")
FINISHED = Decision(allows=True, option="finish")
ANSWERS = (RAISED, FINISHED, DENIED)


def caps(session: Session) -> tuple[float | None, float | None]:
    """Tokens and turns that the session may use, as a person has last raised them."""
    budget = session.config.budget
    if budget is None:
        return None, None
    if session.raised is not None:
        budget = session.raised.budget
    return budget.tokens, budget.turns


def is_over(session: Session, ledger: Ledger) -> bool:
    """Whether the session has used up its own budget, by the independent count."""
    return any(cap is not None and used >= cap for cap, used in zip(caps(session), ledger.spent, strict=True))


def holds_back(session: Session, ledger: Ledger, caller: str | None) -> bool:
    """Whether no turn of this caller may begin."""
    return is_over(session, ledger) or any(use.concerns(caller) for use in session.shared)


def check_prompt(session: Session, ledger: Ledger, granted: frozenset[str], caller: str | None) -> None:
    """Check that this prompt may be sent."""
    check(not is_over(session, ledger), "budget", f"a prompt is sent, and the budget is used up: {ledger.spent}")
    held = [use for use in session.shared if use.stops_turns and use.concerns(caller)]
    check(not held, "budget", f"a prompt is sent, and {held} is reached")
    turn = session.turn
    if session.config.shares_budget and turn is not None and turn.ask is not None and turn.ask.caller == caller:
        check(turn.key in granted, "budget", f"the prompt of {turn.key} is sent, and nobody agreed")


def check_state(session: Session, ledger: Ledger) -> None:
    """Check that the session acts on a budget that is used up."""
    config: Config = session.config
    if config.budget is None and not session.shared:
        return
    tokens, _ = caps(session)
    stops = [use for use in session.shared if use.stops_turns]
    is_spent = tokens is not None and ledger.spent[0] >= tokens
    for turn in (session.turn, session.own):
        is_running = turn is not None and turn.phase is TurnPhase.RUNNING and turn.boundary is None
        if turn is not None and is_running and config.on_budget == "stop":
            is_held = is_spent or any(use.concerns(turn.ask and turn.ask.caller) for use in stops)
            check(not is_held, "budget", f"{turn.id} goes on, and the budget is used up")
    is_asked = session.budget_question is not None or session.is_budget_answered
    if config.on_budget == "ask" and session.mode in (Mode.OPEN, Mode.HANDING) and is_over(session, ledger):
        check(is_asked, "budget", "the budget is used up, and nobody is asked")


def check_close(session: Session, ledger: Ledger, question: str, fact: Fact) -> None:
    """Check that the question about the budget stays the same one for a person, wherever the session goes."""
    is_needless = not question.startswith("q-0.") or not is_over(session, ledger)
    is_answered = isinstance(fact, QuestionAnswered) or session.mode not in KEEPING
    check(is_needless or is_answered, "budget", f"{question} is withdrawn, and the budget is used up")


def waits(session: Session, ledger: Ledger) -> bool:
    """Whether the session rightly waits for a larger budget, and only for that."""
    turns = [waiting for waiting in session.queue if isinstance(waiting, Turn)]
    is_quiet = session.mode is Mode.OPEN and session.turn is None and session.own is None
    return is_quiet and bool(turns) and all(holds_back(session, ledger, turn.ask and turn.ask.caller) for turn in turns)


def key(session: Session) -> tuple[object, ...]:
    """The part of a state that matters to budgets."""
    if session.config.budget is None and not session.config.shares_budget:
        return ()
    return (
        *(session.raised, session.told, session.shared, session.shared_told, session.budget_due),
        *(session.budget_question is None, session.is_budget_answered, session.used),
    )


FULL = CapUse("host", "tokens", 5, 5)
FULL_OF_ALICE = CapUse("caller", "tokens", 5, 5, "alice")
NO_TURN_LEFT = CapUse("caller", "turns", 1, 1, "alice")
