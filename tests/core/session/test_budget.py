"""Tests of budgets in a session: counting, warnings, the gate, stop, the question and shared caps."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.histories import Told
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, of

from banksman.core.dialects.dialect import DENIED, Decision
from banksman.core.dialects.meaning import Requested, RequestPurpose, TurnOpened, TurnOver, UsageReported
from banksman.core.dialects.tokens import Tokens
from banksman.core.session import budget as budgets
from banksman.core.session import budget_gate, crash_recovery
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import INTERACTIVE, NORMAL
from banksman.core.session.budget import Budget, CapUse
from banksman.core.session.effects import AskHuman, ClaimBudget, CloseQuestion, WriteFrame
from banksman.core.session.event import SENT
from banksman.core.session.facts import (
    AppendFailed,
    Begun,
    BudgetChanged,
    BudgetClaimed,
    BudgetWarned,
    QuestionAnswered,
    Reconfigured,
    Timer,
    TimerFired,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase
from banksman.core.session.turn import TurnPhase
from banksman.core.session.usage import Usage, additions, without_repeats
from banksman.errors import StoreError, UsageError

RAISE = Decision(allows=True, option="raise")
FINISH = Decision(allows=True, option="finish")
FULL = CapUse("host", "tokens", 5, 5)


def opened(on_budget: str = "queue", **caps: Any) -> Told:
    return Told(config=replace(TELLING, budget=Budget(**caps), on_budget=on_budget))


def begin(talk: Told, id: str = "a", **more: Any) -> None:
    """Ask, and let the agent begin with the prompt."""
    talk.ask(replace(ask(id, NORMAL), **more))
    if talk.state.process.phase is ProcessPhase.STARTING:
        talk.begin()
    talk.opens(f"{id}0000")


def uses(talk: Told, tokens: int, call: str = "c") -> None:
    talk.mean(UsageReported(call, Tokens(tokens)))


def prompts(talk: Told) -> int:
    return sum(effect.data.startswith(b"P") for effect in of(WriteFrame, talk.effects))


def question_of(talk: Told) -> str:
    assert talk.state.budget_question is not None
    return talk.state.budget_question.id


# -- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [
        *({}, {"tokens": None}, {"tokens": -1}, {"usd": math.nan}, {"usd": math.inf}, {"euro": 5}, {"turns": 1.5}),
        *({"tokens": True}, {"tokens": "5"}, {1: 5}, 5, "tokens=5"),
    ],
    ids=repr,
)
def test_budget_parser_rejects_wrong_value(value: Any) -> None:
    with pytest.raises(UsageError):
        budgets.parse(value)


def test_budget_parser_takes_mapping_and_value() -> None:
    budget = Budget(tokens=10, usd=1.5)
    assert budgets.parse({"tokens": 10.0, "usd": 1.5, "turns": None}) == budget
    assert budgets.parse(budget) == budget
    assert budgets.parse(None) is None
    assert budgets.parse_words("tokens=10, usd=1.5") == budget
    for text in ("", "tokens", "tokens=", "tokens=x", "euro=5", "tokens=-1"):
        with pytest.raises(UsageError):
            budgets.parse_words(text)


def test_cap_use_text_calls_cost_an_estimate() -> None:
    assert CapUse("session", "tokens", 1200, 1000).text == "1,200 of 1,000 tokens"
    assert CapUse("session", "usd", 5.034, 5.0).text == "5.03 of 5 US dollars (estimate)"


# -- the gate --------------------------------------------------------------------------------------------------------
def test_budget_warns_once_at_80_percent_and_tells_its_end() -> None:
    talk = opened(tokens=100)
    begin(talk)
    uses(talk, 79)
    assert talk.logged("budget.warning") == []
    uses(talk, 80)
    uses(talk, 99)
    [warning] = talk.logged("budget.warning")
    assert warning == {"scope": "session", "unit": "tokens", "used": 80, "cap": 100, "caller": None}
    assert talk.logged("budget.exceeded") == []
    uses(talk, 101)
    uses(talk, 120)
    [exceeded] = talk.logged("budget.exceeded")
    assert (exceeded["used"], exceeded["cap"]) == (101, 100)


def test_budget_that_queues_lets_turn_finish_and_grants_no_other() -> None:
    talk = opened(tokens=5)
    begin(talk)
    talk.ask(ask("b", INTERACTIVE))
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.INTERRUPTING  # It is preempted while the budget lasts.
    talk = opened(tokens=5)
    begin(talk)
    uses(talk, 5)
    talk.ask(ask("b", INTERACTIVE))
    talk.ask(ask("c", NORMAL, on_busy="interrupt"))
    talk.ask(ask("d", NORMAL, on_busy="steer"))
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.RUNNING
    talk.over("a0000")
    assert talk.outcomes["a"].kind is Kind.DONE
    assert (talk.state.turn, len(talk.state.queue)) == (None, 3)
    assert prompts(talk) == 1


def test_budget_that_stops_interrupts_turn_with_its_clock() -> None:
    talk = opened("stop", tokens=5)
    begin(talk)
    uses(talk, 4)
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.RUNNING
    uses(talk, 6)
    assert talk.state.turn.phase is TurnPhase.INTERRUPTING
    [interrupted] = talk.logged("turn.interrupted")
    assert (interrupted["cause"], interrupted["clock"]) == ("budget", "budget")
    talk.mean(TurnOver(("a0000",), is_aborted=True))
    talk.hear(b"cancelled a0000")
    outcome = talk.outcomes["a"]
    assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")


def test_interrupt_is_sent_before_later_frames_of_the_same_read() -> None:
    talk = opened("stop", tokens=5)
    begin(talk)
    talk.mean(UsageReported("c", Tokens(5)), UsageReported("d", Tokens(5)))
    kinds = [kind for append in talk.appends for _, kind, _ in append]
    exceeded = kinds.index("budget.exceeded")
    assert SENT in kinds[exceeded:]
    assert kinds[exceeded:].index(SENT) < kinds[exceeded:].index("usage.reported")


def test_budget_that_stops_ends_turn_that_agent_opens() -> None:
    talk = opened("stop", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(5))
    talk.mean(TurnOpened(origin="task", can_interrupt=True))
    assert talk.state.own is not None
    assert talk.state.own.phase is TurnPhase.INTERRUPTING


def test_budget_of_turns_stops_no_running_turn() -> None:
    talk = opened("stop", turns=2)
    talk.serve(ask("a", NORMAL))
    begin(talk, "b")
    talk.ask(ask("c", NORMAL))
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.RUNNING
    talk.over("b0000")
    assert prompts(talk) == 2
    assert [turn.id for turn in talk.state.queue] == ["c"]


def test_granted_turn_waits_again_when_budget_is_used_up_before_it_is_sent() -> None:
    talk = opened(tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(1))
    talk.is_log_slow = True
    talk.ask(ask("b", NORMAL))
    talk.tell(Reconfigured(0.0, replace(talk.state.config, budget=Budget(tokens=1)), replaces=False))
    talk.commit()
    assert prompts(talk) == 1
    assert [turn.id for turn in talk.state.queue] == ["b"]


def test_larger_budget_opens_gate_at_once() -> None:
    talk = opened(tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(5))
    talk.ask(ask("b", NORMAL))
    assert prompts(talk) == 1
    talk.tell(Reconfigured(0.0, replace(talk.state.config, budget=Budget(tokens=6)), replaces=False))
    assert prompts(talk) == 2


def test_waiting_asks_do_not_keep_process() -> None:
    talk = opened(tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(5))
    talk.ask(ask("b", NORMAL))
    assert talk.state.idle_since is not None


def test_usage_of_session_is_the_same_after_replay() -> None:
    talk = opened(tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(3), cost=0.5)
    begin(talk, "b")
    uses(talk, 2)
    past = pasts.beginning(talk.state.config)
    for append in talk.appends:
        past = pasts.fold(past, append)
    assert past.session.used == talk.state.used == Usage(Tokens(5), 0.5, 0.0, 1)
    again = Told(past=pasts.decode(pasts.encode(replace(past, session=replace(past.session, turn=None))), TELLING))
    again.state = replace(again.state, config=talk.state.config)
    again.tell(Begun(0.0))
    again.ask(ask("c", NORMAL))
    assert again.state.process.phase is ProcessPhase.NONE
    assert again.logged("budget.exceeded") == []  # The log has it.


def test_usage_of_lost_events_is_logged_when_log_returns() -> None:
    talk = opened(tokens=100)
    begin(talk, caller="alice")
    uses(talk, 5)
    talk.is_log_slow = True
    uses(talk, 25)
    talk.at = 3.0
    talk.tell(AppendFailed(talk.at, StoreError("the disk is full")))
    talk.is_log_slow = False
    talk.appends.pop()
    talk.is_log_slow = True
    talk.fire((Timer.STORE, "1"))
    [retried] = [append for append in talk.appends if "session.store_returned" in [kind for _, kind, _ in append]]
    lost = ("alice", None, Usage(Tokens(20), None, 0.0, 0))
    rest = ("alice", None, Usage(Tokens(0), None, 3.0, 1))
    assert additions(retried) == [lost, rest]
    # A process that counts its own appends has counted the lost events, and counts the rest once.
    assert additions(without_repeats(retried)) == [rest]
    talk.tell(AppendFailed(talk.at, StoreError("the disk is full")))
    talk.is_log_slow = False
    talk.appends.pop()
    talk.fire((Timer.STORE, "2"))
    [again] = [append for append in talk.appends if "session.store_returned" in [kind for _, kind, _ in append]]
    assert additions(again) == [lost, rest]
    assert additions(without_repeats(again)) == []
    past = pasts.beginning(talk.state.config)
    for append in talk.appends:
        past = pasts.fold(past, append)
    assert past.session.used == talk.state.used == Usage(Tokens(25), None, 3.0, 1)


# -- working time ----------------------------------------------------------------------------------------------------
def test_working_time_is_stopped_at_its_cap_and_pauses_for_questions() -> None:
    talk = opened("stop", working_seconds=10.0)
    begin(talk)
    talk.wait(7.9)
    assert talk.logged("budget.warning") == []
    talk.wait(0.2)
    [warning] = talk.logged("budget.warning")
    assert warning["used"] == pytest.approx(8.0)
    talk.mean(Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "Bash"))
    assert talk.waits_for(Timer.BUDGET) == []
    talk.wait(60.0)
    talk.tell(QuestionAnswered(talk.at, talk.named(), DENIED))
    talk.wait(1.8)
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.RUNNING
    talk.wait(0.2)
    assert talk.state.turn.phase is TurnPhase.INTERRUPTING


def test_working_time_of_earlier_turns_counts() -> None:
    talk = opened("stop", working_seconds=10.0)
    begin(talk)
    talk.wait(6.0)
    talk.over("a0000")
    assert talk.waits_for(Timer.BUDGET) == []
    talk.wait(100.0)
    begin(talk, "b")
    talk.wait(4.1)
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.INTERRUPTING


def test_late_budget_timer_has_no_effect() -> None:
    talk = opened("stop", working_seconds=10.0)
    begin(talk)
    talk.tell(TimerFired(1.0, (Timer.BUDGET, "session")))
    assert talk.logged("budget.warning") == []
    assert talk.waits_for(Timer.BUDGET) == ["session"]


# -- the question ----------------------------------------------------------------------------------------------------
def test_budget_that_asks_continues_turn_and_asks_once() -> None:
    talk = opened("ask", tokens=5)
    begin(talk)
    uses(talk, 5)
    uses(talk, 9)
    [shown] = of(AskHuman, talk.effects)
    assert shown.asked.wants is RequestPurpose.BUDGET
    assert [option["optionId"] for option in shown.asked.details["options"]] == ["finish", "raise", "stop"]
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.RUNNING
    talk.ask(ask("b", NORMAL))
    talk.over("a0000")
    assert prompts(talk) == 1


def test_raise_adds_cap_and_opens_gate() -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    talk.ask(ask("b", NORMAL))
    talk.tell(QuestionAnswered(0.0, question_of(talk), RAISE))
    assert talk.logged("budget.raised") == [{"base": {"tokens": 5}, "budget": {"tokens": 12}}]
    assert prompts(talk) == 2
    talk.opens("b0000")
    uses(talk, 5)
    assert [body["cap"] for body in talk.logged("budget.exceeded")] == [5, 12]
    assert len(of(AskHuman, talk.effects)) == 2


def test_reopen_with_other_budget_ends_raise() -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    talk.tell(QuestionAnswered(0.0, question_of(talk), RAISE))
    talk.tell(Reconfigured(0.0, replace(talk.state.config, budget=Budget(tokens=6)), replaces=False))
    assert budget_gate.budget_of(talk.state) == Budget(tokens=6)
    assert talk.state.budget_question is not None


@pytest.mark.parametrize(("decision", "phase"), [(FINISH, TurnPhase.RUNNING), (DENIED, TurnPhase.INTERRUPTING)])
def test_answer_decides_about_running_turn_and_is_not_asked_again(decision: Decision, phase: TurnPhase) -> None:
    talk = opened("ask", tokens=5)
    begin(talk)
    uses(talk, 5)
    talk.ask(ask("b", NORMAL))
    talk.tell(QuestionAnswered(0.0, question_of(talk), decision))
    assert talk.state.turn is not None
    assert talk.state.turn.phase is phase
    uses(talk, 9)
    assert len(of(AskHuman, talk.effects)) == 1
    assert prompts(talk) == 1


def next_host(talk: Told, config: Config) -> Told:
    """Continue from the log alone, without the process."""
    past = pasts.beginning(config)
    for append in talk.appends:
        past = pasts.fold(past, append)
    after = Told(past=pasts.fold(past, crash_recovery.settle(past)), config=config)
    after.tell(Begun(0.0))
    return after


@pytest.mark.parametrize(
    ("decision", "option"),
    [(FINISH, "finish"), (Decision(allows=True), "finish"), (DENIED, "stop"), (RAISE, "raise")],
)
def test_log_has_the_option_that_was_applied_and_the_next_host_asks_no_more(decision: Decision, option: str) -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    talk.tell(QuestionAnswered(0.0, question_of(talk), decision))
    assert talk.logged("question.answered")[-1]["option"] == option
    after = next_host(talk, talk.state.config)
    assert after.state.is_budget_answered == (option != "raise")
    assert after.state.budget_question is None
    assert of(AskHuman, after.effects) == []
    after.ask(ask("b", NORMAL))
    assert (after.state.process.phase is ProcessPhase.STARTING) == (option == "raise")


def test_next_host_with_a_larger_budget_asks_again_when_it_is_used_up() -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    talk.tell(QuestionAnswered(0.0, question_of(talk), FINISH))
    after = next_host(talk, replace(talk.state.config, budget=Budget(tokens=9)))
    assert not after.state.is_budget_answered
    after.ask(ask("b", NORMAL))
    after.begin()
    after.opens("b0000")
    uses(after, 9)
    assert after.state.budget_question is not None


def test_callback_that_allows_everything_does_not_raise_budget() -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    talk.tell(QuestionAnswered(0.0, question_of(talk), Decision(allows=True)))
    talk.ask(ask("b", NORMAL))
    assert prompts(talk) == 1


def test_question_about_budget_outlives_process_and_is_withdrawn_by_larger_budget() -> None:
    talk = opened("ask", tokens=5)
    talk.serve(ask("a", NORMAL), tokens=Tokens(7))
    id = question_of(talk)
    talk.die(code=0)
    assert question_of(talk) == id
    talk.tell(Reconfigured(0.0, replace(talk.state.config, budget=Budget(tokens=70)), replaces=False))
    assert [effect.question for effect in of(CloseQuestion, talk.effects)] == [id]
    assert talk.logged("question.answered")[-1]["answer"] == "withdrawn"


# -- shared caps -----------------------------------------------------------------------------------------------------
def shared(on_budget: str = "queue") -> Told:
    return Told(config=replace(TELLING, shares_budget=True, on_budget=on_budget))


def claims(talk: Told) -> list[ClaimBudget]:
    return of(ClaimBudget, talk.effects)


def test_prompt_is_sent_only_after_claim_is_granted() -> None:
    talk = shared()
    talk.ask(ask("a", NORMAL, caller="alice"))
    talk.begin()
    assert claims(talk) == [ClaimBudget("a#1", "alice")]
    assert prompts(talk) == 0
    talk.tell(BudgetClaimed(0.0, "a#1", granted=True))
    assert prompts(talk) == 1


def test_refused_turn_waits_until_cap_is_free_again() -> None:
    talk = shared()
    talk.ask(ask("a", NORMAL, caller="alice"))
    talk.begin()
    full = CapUse("caller", "turns", 1, 1, "alice")
    talk.tell(BudgetClaimed(0.0, "a#1", granted=False, reached=(full,)))
    assert [turn.id for turn in talk.state.queue] == ["a"]
    assert len(claims(talk)) == 1
    [exceeded] = talk.logged("budget.exceeded")
    assert (exceeded["scope"], exceeded["caller"]) == ("caller", "alice")
    talk.ask(ask("b", NORMAL, caller="bob"))
    talk.tell(BudgetClaimed(0.0, claims(talk)[-1].key, granted=True, reached=(full,)))
    assert prompts(talk) == 1  # Another caller passes.
    talk.over("b0000")
    talk.tell(BudgetChanged(0.0, ()))
    assert claims(talk)[-1].key == "a#2"


def test_shared_cap_stops_only_turns_of_its_caller() -> None:
    for caller, phase in (("alice", TurnPhase.INTERRUPTING), ("bob", TurnPhase.RUNNING)):
        talk = shared("stop")
        talk.ask(ask("a", NORMAL, caller=caller))
        talk.begin()
        talk.tell(BudgetClaimed(0.0, "a#1", granted=True))
        talk.opens("a0000")
        talk.tell(BudgetChanged(0.0, (CapUse("caller", "tokens", 5, 5, "alice"),)))
        assert talk.state.turn is not None
        assert talk.state.turn.phase is phase


def test_idle_session_logs_no_shared_cap() -> None:
    talk = shared("ask")
    talk.tell(BudgetChanged(0.0, (FULL,)))
    assert talk.logged("budget.exceeded") == []
    assert of(AskHuman, talk.effects) == []
    talk.ask(ask("a", NORMAL))
    talk.tell(BudgetChanged(0.0, (replace(FULL, used=6),)))
    assert len(talk.logged("budget.exceeded")) == 1
    [shown] = of(AskHuman, talk.effects)
    assert [option["optionId"] for option in shown.asked.details["options"]] == ["finish", "stop"]


def test_warning_about_shared_cap_is_logged() -> None:
    talk = shared()
    talk.tell(BudgetWarned(0.0, replace(FULL, used=4)))
    assert talk.logged("budget.warning")[0]["scope"] == "host"


def test_asks_of_two_callers_are_not_collected_into_one_turn() -> None:
    for config, turns in ((TELLING, 1), (replace(TELLING, shares_budget=True), 2)):
        talk = Told(config=config)
        talk.ask(ask("a", NORMAL, on_busy="collect", caller="alice"))
        talk.ask(ask("b", NORMAL, on_busy="collect", caller="bob"))
        assert len(talk.state.queue) == turns


@pytest.mark.parametrize(("caller", "is_steered"), [("alice", True), ("bob", False), (None, False)])
def test_steered_ask_joins_only_turn_of_its_caller(caller: str | None, is_steered: bool) -> None:
    talk = shared()
    talk.ask(ask("a", NORMAL, caller="alice"))
    talk.begin()
    talk.tell(BudgetClaimed(0.0, "a#1", granted=True))
    talk.opens("a0000")
    talk.ask(ask("s", NORMAL, on_busy="steer", caller=caller))
    assert [turn.id for turn in talk.state.queue] == ([] if is_steered else ["s"])
    assert prompts(talk) == (2 if is_steered else 1)
