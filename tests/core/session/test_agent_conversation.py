"""The conversation over several turns and processes: its cost, its overflow, structured answers, and its origin."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.meaning import TurnOpened, TurnOver
from banksman.core.process_facts import (
    Started,
)
from banksman.core.session import event as kinds
from banksman.core.session.agent_conversation import LARGE_PROMPT_CHARACTERS
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import Effect, HoldConversation, StartProcess, StopProcess
from banksman.core.session.facts import (
    ConversationTaken,
    ProcessReported,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.state import Session
from banksman.errors import AgentError, NotOwner

A, B, C = (ask(name, NORMAL) for name in "abc")
TOO_LONG: dict[str, Any] = {"is_error": True, "is_overflow": True, "error": "Prompt is too long"}


def costs(talk: Talk) -> dict[str, float | None]:
    return {turn: outcome.cost for turn, outcome in talk.outcomes.items()}


def stopped(effects: list[Effect]) -> bool:
    return bool(of(StopProcess, effects))


# -- cost ------------------------------------------------------------------------------------------------------------
def test_turn_cost_is_growth_of_conversation_total() -> None:
    talk = Talk(TELLING)
    talk.serve(A, spent=1.0)
    talk.serve(B, spent=1.5)
    talk.serve(C)  # No cost reported.
    talk.serve(ask("d", NORMAL), spent=1.5)
    assert costs(talk) == {"a": 1.0, "b": 0.5, "c": None, "d": 0.0}
    assert talk.state.spent == 1.5
    assert [body["cost"] for body in talk.logged(kinds.TURN_ENDED)] == [1.0, 0.5, None, 0.0]
    assert [body["spent"] for body in talk.logged(kinds.TURN_ENDED)] == [1.0, 1.5, 1.5, 1.5]


def test_turn_cost_prefers_figure_of_agent() -> None:
    talk = Talk(TELLING)
    talk.serve(A, spent=1.0, cost=0.25)
    talk.serve(B, spent=3.0)
    assert costs(talk) == {"a": 0.25, "b": 2.0}


def test_turn_cost_is_unknown_for_first_turn_of_adopted_conversation() -> None:
    talk = Talk(state=Session(config=TELLING, conversation="old", spent=None))
    talk.serve(A, spent=7.0)
    talk.serve(B, spent=8.0)
    assert costs(talk) == {"a": None, "b": 1.0}


def test_turn_cost_restarts_when_total_went_back() -> None:
    """After a kill, the agent counts from its last saved total, or from zero."""
    talk = Talk(TELLING)
    talk.serve(A, spent=2.0)
    talk.die(signal=9)
    talk.serve(B, spent=0.5)
    assert costs(talk)["b"] == 0.5
    talk.serve(C, spent=0.75)
    assert costs(talk)["c"] == 0.25


def test_turn_cost_continues_through_resume() -> None:
    talk = Talk(TELLING)
    talk.serve(A, spent=2.0)
    talk.die(code=1)
    talk.serve(B, spent=2.5)
    assert costs(talk)["b"] == 0.5


def test_turn_cost_excludes_agent_initiated_turn() -> None:
    talk = Talk(TELLING)
    talk.serve(A, spent=1.0)
    talk.mean(TurnOpened(origin="task", can_interrupt=True), TurnOver(origin="task", spent=4.0))
    talk.serve(B, spent=4.5)
    assert costs(talk) == {"a": 1.0, "b": 0.5}


def test_session_cost_sums_what_was_reported() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    assert talk.state.cost is None
    talk.serve(B, spent=1.0)
    talk.mean(TurnOpened(origin="task", can_interrupt=True), TurnOver(origin="task", spent=1.5))
    talk.serve(C, spent=9.0, cost=0.25)
    assert talk.state.cost == 1.75
    # The total continues in a new conversation: it belongs to the session.
    talk.serve(ask("d", NORMAL), **TOO_LONG)
    talk.die(signal=15)
    talk.serve(ask("e", NORMAL), spent=0.25)
    assert talk.state.cost == 2.0
    assert [body["cost_in_all"] for body in talk.logged(kinds.TURN_ENDED)] == [None, 1.0, 1.5, 1.75, 1.75, 2.0]


# -- overflow --------------------------------------------------------------------------------------------------------
def test_overflow_of_small_prompt_ends_conversation_at_once() -> None:
    talk = Talk(TELLING)
    talk.serve(A, spent=3.0)
    assert talk.state.conversation == "talk"
    effects = talk.serve(B, **TOO_LONG)
    assert talk.kinds["b"] is Kind.FAILED
    assert of(HoldConversation, effects) == [HoldConversation(None)]
    assert talk.state.conversation is None
    [lost] = talk.logged(kinds.SESSION_CONTEXT_LOST)
    assert lost == {"conversation": "talk", "error": "Prompt is too long"}
    # The next turn does not get the process of the overflowed conversation.
    assert stopped(effects)
    talk.die(signal=15)
    effects = talk.ask(C)
    assert of(StartProcess, effects) == [StartProcess(2, None)]
    talk.begin()
    talk.over("c0000", spent=0.5)
    assert talk.kinds["c"] is Kind.DONE
    # The new conversation has a new name and no earlier cost.
    assert talk.state.conversation == "talk"
    assert of(HoldConversation, talk.effects)[-1] == HoldConversation("talk")
    assert costs(talk)["c"] == 0.5


def test_retired_conversation_name_is_not_learnt_again() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(B)
    talk.mean(TurnOver(("a0000",), conversation="talk", **TOO_LONG))
    talk.hear(b"init", b"over own", b"settled a0000")
    talk.mean(TurnOver(conversation="other"))
    assert talk.state.conversation is None
    assert of(HoldConversation, talk.effects)[-1] == HoldConversation(None)
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, None)]


@pytest.mark.parametrize("is_text", [True, False])
def test_overflow_of_large_prompt_is_forgiven_once(is_text: bool) -> None:
    text = "x" * LARGE_PROMPT_CHARACTERS
    prompt = text if is_text else [{"type": "text", "text": text}]
    talk = Talk(TELLING)
    talk.serve(A)
    effects = talk.serve(replace(B, prompt=prompt), **TOO_LONG)
    assert talk.kinds["b"] is Kind.FAILED
    assert talk.state.conversation == "talk"
    assert not stopped(effects)
    assert not talk.logged(kinds.SESSION_CONTEXT_LOST)
    # The next ask overflows too, so the prompt is not the reason.
    effects = talk.serve(replace(C, prompt=prompt), **TOO_LONG)
    assert talk.state.conversation is None
    assert len(talk.logged(kinds.SESSION_CONTEXT_LOST)) == 1
    assert stopped(effects)


def test_prompt_just_below_limit_counts_as_small() -> None:
    talk = Talk(TELLING)
    talk.serve(replace(A, prompt="x" * (LARGE_PROMPT_CHARACTERS - 1)), **TOO_LONG)
    assert talk.state.conversation is None


def test_overflow_is_forgiven_after_success_and_not_after_error() -> None:
    large = "x" * LARGE_PROMPT_CHARACTERS
    forgiven = Talk(TELLING)
    forgiven.serve(replace(A, prompt=large), **TOO_LONG)
    forgiven.serve(B)
    forgiven.serve(replace(C, prompt=large), **TOO_LONG)
    assert forgiven.state.conversation == "talk"
    again = Talk(TELLING)
    again.serve(replace(A, prompt=large), **TOO_LONG)
    again.serve(B, is_error=True, error="529")
    again.serve(replace(C, prompt=large), **TOO_LONG)
    assert again.state.conversation is None


# -- structured answers ----------------------------------------------------------------------------------------------
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
EXACT = replace(A, schema=SCHEMA)


def test_schema_is_sent_at_start_and_answer_is_checked() -> None:
    talk = Talk(TELLING)
    talk.ask(EXACT)
    started = talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    assert sent(started) == [f"H handshake-1 [] [] {SCHEMA}\n".encode()]
    talk.hear(b"ok handshake-1")
    talk.over("a0000", structured={"n": 1})
    assert talk.outcomes["a"].kind is Kind.DONE
    assert talk.outcomes["a"].structured == {"n": 1}
    assert talk.logged(kinds.TURN_ENDED)[0]["structured"] == {"n": 1}


@pytest.mark.parametrize("structured", [None, {"n": "one"}, {}])
def test_unfitting_answer_fails_turn(structured: Any) -> None:
    talk = Talk(TELLING)
    talk.serve(EXACT, structured=structured, text="in words")
    outcome = talk.outcomes["a"]
    assert outcome.kind is Kind.FAILED
    assert isinstance(outcome.error, AgentError)
    assert "schema" in str(outcome.error)
    # The text is kept, but an invalid value is not returned as an answer.
    assert outcome.text == "in words"
    assert outcome.structured is None


def test_changed_schema_starts_new_process() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    # The first process was started without the schema.
    effects = talk.ask(replace(B, schema=SCHEMA))
    assert stopped(effects)
    assert sent(effects) == []
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, "talk")]
    talk.begin()
    talk.over("b0000", structured={"n": 1})
    assert talk.kinds["b"] is Kind.DONE
    # An equal schema with another member order.
    talk.serve(replace(C, schema=dict(reversed(SCHEMA.items()))), structured={"n": 2})
    assert talk.kinds["c"] is Kind.DONE
    assert len(talk.starts) == 2
    # An ask without a schema: an agent with a schema answers in that form.
    assert stopped(talk.ask(ask("d", NORMAL)))
    assert [body["reason"] for body in talk.logged(kinds.PROCESS_RETIRED)] == ["schema", "schema"]


def test_process_is_started_for_ask_served_first() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    # A more urgent ask with a schema arrives before the process is ready.
    talk.ask(replace(ask("u", 20), schema=SCHEMA))
    effects = talk.hear(b"ok handshake-1")
    assert stopped(effects)
    assert sent(effects) == []
    talk.die(signal=15)
    talk.begin()
    talk.over("u0000", structured={"n": 1})
    assert talk.kinds == {"u": Kind.DONE}


# -- origin of the conversation --------------------------------------------------------------------------------------
def test_fork_begins_as_copy_and_becomes_its_own() -> None:
    talk = Talk(state=Session(config=TELLING, fork_of="theirs", spent=None))
    talk.ask(A)
    assert talk.starts == [StartProcess(1, "theirs", forks=True)]
    talk.begin()
    # Until the conversation has its own name, a new process forks again.
    talk.die(signal=9)
    talk.ask(B)
    assert talk.starts[-1] == StartProcess(2, "theirs", forks=True)
    talk.begin()
    talk.over("b0000", spent=3.0)
    assert of(HoldConversation, talk.effects) == [HoldConversation("talk")]
    assert costs(talk)["b"] is None
    talk.die(code=1)
    talk.serve(C, spent=3.5)
    assert talk.starts[-1] == StartProcess(3, "talk")
    assert costs(talk)["c"] == 0.5


def test_fork_of_missing_conversation_begins_with_nothing() -> None:
    talk = Talk(state=Session(config=TELLING, fork_of="theirs", spent=None))
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    effects = talk.die(code=1, stderr="forgotten")
    assert of(StartProcess, effects) == [StartProcess(2, None)]
    assert talk.logged(kinds.SESSION_CONTEXT_LOST)[0]["conversation"] == "theirs"
    talk.begin()
    talk.over("a0000", spent=1.0)
    assert costs(talk) == {"a": 1.0}


@pytest.mark.parametrize("how", ["conversation", "fork_of"])
def test_unknown_adopted_conversation_fails_its_ask(how: str) -> None:
    first = Session(config=TELLING, spent=None, is_adopted=True)
    talk = Talk(
        state=replace(first, conversation="theirs") if how == "conversation" else replace(first, fork_of="theirs")
    )
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    talk.die(code=1, stderr="forgotten")
    # The asks are not answered from an empty conversation.
    assert talk.kinds == {"a": Kind.FAILED}
    assert "'theirs'" in str(talk.outcomes["a"].error)
    assert of(HoldConversation, talk.effects) == [HoldConversation(None)]
    # A later ask knows that, and begins a new conversation.
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, None)]


def test_adopted_conversation_is_ordinary_once_agent_has_used_it() -> None:
    talk = Talk(state=Session(config=TELLING, conversation="talk", spent=None, is_adopted=True))
    talk.serve(A)
    talk.die(code=1)
    talk.ask(B)
    talk.tell(ProcessReported(0.0, 2, Started(77, 0.0)))
    effects = talk.die(code=1, stderr="forgotten")
    assert of(StartProcess, effects) == [StartProcess(3, None)]
    assert talk.kinds == {"a": Kind.DONE}


def test_conversation_driven_by_another_session_fails_turn_and_ends_process() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.begin()
    assert of(HoldConversation, talk.opens("a0000")) == [HoldConversation("talk")]
    effects = talk.tell(ConversationTaken(0.0, 1, NotOwner("cannot lease talk: session x holds it"), None))
    assert stopped(effects)
    talk.die(signal=15)
    assert talk.kinds == {"a": Kind.FAILED}
    assert "session x" in str(talk.outcomes["a"].error)


@pytest.mark.parametrize("held", [None, "ours"])
def test_next_process_does_not_resume_conversation_of_another_session(held: str | None) -> None:
    talk = Talk(state=Session(config=TELLING, conversation=held))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.tell(ConversationTaken(0.0, 1, NotOwner("cannot lease talk: session x holds it"), held))
    assert [body["conversation"] for body in talk.logged(kinds.SESSION_CONVERSATION)] == ["talk", held]
    talk.die(signal=15)
    talk.wait(100.0)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, held)]
    # If the agent names the same conversation again, it must be leased again. Otherwise the conflict would stay
    # unnoticed.
    talk.begin()
    assert of(HoldConversation, talk.opens("b0000")) == [HoldConversation("talk")]


def test_fork_that_enters_conversation_of_another_session_is_forked_again() -> None:
    talk = Talk(state=Session(config=TELLING, fork_of="theirs", spent=None))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.tell(ConversationTaken(0.0, 1, NotOwner("cannot lease talk: session x holds it"), None))
    talk.die(signal=15)
    talk.wait(100.0)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "theirs", forks=True)]


def test_late_conversation_loss_of_dead_process_is_ignored() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    talk.die(code=1)
    talk.ask(B)
    assert talk.tell(ConversationTaken(0.0, 1, NotOwner("late"), None)) == []
    assert talk.state.conversation == "talk"
