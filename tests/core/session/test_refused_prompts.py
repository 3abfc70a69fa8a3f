"""Steered prompts that the agent refuses: each becomes an ordinary ask again."""

from __future__ import annotations

from msgspec.structs import replace
from tests.core.session import toy
from tests.core.session.scenarios import ask
from tests.core.session.talk import CONFIG, Talk, sent

from banksman.core.dialects.dialect import Prompt
from banksman.core.dialects.meaning import PromptRefused, TurnOver
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.facts import AskWithdrawn, CloseAsked
from banksman.core.session.outcome import Kind
from banksman.errors import UsageError

A = ask("a", NORMAL)
STEER, LATER = ask("steer", NORMAL, on_busy="steer"), ask("later", NORMAL, on_busy="steer")


def _steered() -> Talk:
    talk = Talk()
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    assert sent(talk.ask(STEER)) == [b"P steer0000\n"]
    return talk


def test_refused_prompt_waits_for_end_of_running_turn() -> None:
    talk = _steered()
    assert not sent(talk.mean(PromptRefused("steer0000")))
    heard = talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    # Each attempt has its own prompt ref.
    assert sent(heard) == [b"P steer0002\n"]
    talk.over("steer0002")
    assert talk.kinds["steer"] is Kind.DONE


def test_refused_prompt_is_sent_as_own_turn_after_turn_end() -> None:
    talk = _steered()
    assert sent(talk.ask(LATER)) == [b"P later0000\n"]
    assert not sent(talk.hear(b"over a0000 a0000", b"settled a0000"))
    assert sent(talk.mean(PromptRefused("steer0000"))) == [b"P steer0002\n"]
    # Prompts that were added later are refused, too, and keep their order.
    assert not sent(talk.mean(PromptRefused("later0000")))
    assert sent(talk.over("steer0002")) == [b"P later0002\n"]
    talk.over("later0002")
    assert set(talk.kinds.values()) == {Kind.DONE}
    assert len(talk.logged(kinds.TURN_ENDED)) == 3


def test_refused_prompt_is_not_resent_when_withdrawn() -> None:
    talk = _steered()
    talk.tell(AskWithdrawn(talk.at, "steer"))
    talk.mean(PromptRefused("steer0000"))
    assert talk.kinds == {"steer": Kind.WITHDRAWN}


def test_refused_prompt_is_refused_when_session_closes() -> None:
    talk = _steered()
    talk.tell(CloseAsked(talk.at))
    talk.mean(PromptRefused("steer0000"))
    talk.die(signal=15)
    assert talk.kinds == {"a": Kind.INTERRUPTED, "steer": Kind.REFUSED}


def test_refusal_of_unknown_prompt_is_ignored() -> None:
    talk = _steered()
    assert not sent(talk.mean(PromptRefused("other0000")))
    talk.hear(b"over a0000 a0000 steer0000", b"settled steer0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE, "steer": Kind.DONE}


def test_steered_prompt_waits_when_agent_does_not_name_its_work() -> None:
    """The agent may begin it only after the turn: its answer would be taken for the next turn's."""
    talk = Talk()
    talk.ask(A)
    talk.begin()
    assert not sent(talk.ask(STEER))
    assert sent(talk.mean(TurnOver(text="a0000")) + talk.wait(0.5)) == [b"P steer0000\n"]


class Narrow(toy.ToyDialect):
    """A dialect that accepts only short prompts, and refuses a long one only when it is sent."""

    def prompt(self, ref: str, prompt: Prompt) -> bytes:
        if len(prompt) > 10:
            raise UsageError("the prompt is too long")
        return super().prompt(ref, prompt)


def test_unsendable_prompt_fails_only_its_turn() -> None:
    """Each collected prompt is checked alone, but together they may be too long."""
    talk = Talk(replace(CONFIG, dialect=Narrow()))
    talk.ask(replace(A, prompt="far too long a prompt"))
    talk.begin()
    assert talk.kinds == {"a": Kind.FAILED}
    assert "too long" in str(talk.outcomes["a"].error)
    talk.serve(ask("b", NORMAL))
    assert talk.kinds["b"] is Kind.DONE


def test_unsendable_steered_prompt_fails_when_its_turn_comes() -> None:
    talk = Talk(replace(CONFIG, dialect=Narrow()))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(replace(STEER, prompt="far too long a prompt"))
    assert not talk.kinds
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE, "steer": Kind.FAILED}
