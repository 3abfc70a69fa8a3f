"""Regressions of the session state machine: the shortest order of facts for each bug."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.meaning import (
    PromptSettled,
    Replied,
    Requested,
    RequestPurpose,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.effects import SettingTaken, StartProcess, StopProcess
from banksman.core.session.facts import Reconfigured, SettingAsked, Timer
from banksman.core.session.outcome import Kind
from banksman.core.session.state import Session

A, B = ask("a", NORMAL), ask("b", NORMAL)
SAVE = replace(ask("save", BACKGROUND), is_last=True)
EXACT = replace(A, schema={"type": "object"})
OLD = replace(TELLING, recycle_seconds=10.0, save_prompt="put it down")


def test_save_is_sent_to_process_with_schema() -> None:
    talk = Talk(OLD)
    talk.serve(EXACT, structured={})
    talk.wait(10.0)
    assert sent(talk.ask(SAVE)) == [b"P save0000\n"]


def test_preempted_save_does_not_replace_process() -> None:
    talk = Talk(OLD)
    talk.serve(A)
    talk.wait(10.0)
    talk.ask(SAVE)
    talk.opens("save0000")
    talk.ask(ask("urgent", INTERACTIVE))
    talk.hear(b"ok interrupt-save#1-1", b"over save0000! save0000", b"settled save0000")
    assert talk.kinds["save"] is Kind.PREEMPTED
    talk.over("urgent0000")
    assert not of(StopProcess, talk.effects), "it is asked again, and not replaced before it has saved"


def test_unknown_conversation_fails_every_queued_ask() -> None:
    state = Session(config=TELLING, conversation="unknown", is_adopted=True, spent=None)
    talk = Talk(state=state)
    talk.ask(A)
    talk.ask(B)
    talk.die(code=1, stderr="forgotten")
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.FAILED}
    assert all("unknown" in str(outcome.error) for outcome in talk.outcomes.values())
    assert of(StartProcess, talk.ask(ask("c", NORMAL))) == [StartProcess(2, None)]


def test_older_setting_does_not_override_newer_one() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    talk.tell(SettingAsked(0.0, "1", "model", "old"))
    talk.tell(SettingAsked(0.0, "2", "model", "new"))
    talk.mean(Replied("setting-1-2"))
    assert [effect.change for effect in of(SettingTaken, talk.effects)] == ["1", "2"]
    talk.wait(100.0)
    assert talk.state.settings == (("model", "new"),)
    assert not of(StopProcess, talk.effects)


def test_repeated_boundary_is_counted_once() -> None:
    talk = Talk(TELLING)
    big = replace(A, prompt="x" * (256 << 10))
    over = {"is_error": True, "is_overflow": True, "cost": 0.5}
    talk.serve(big, **over)
    talk.mean(TurnOver(("a0000",), is_error=True, is_overflow=True, cost=0.5))
    assert talk.state.cost == 0.5
    assert talk.logged(kinds.SESSION_CONTEXT_LOST) == [], "one large prompt is not the conversation's fault"


def test_repeated_prompt_settlement_does_not_keep_turn_open() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    for _ in range(10):
        talk.mean(PromptSettled("a0000"))
        talk.wait(4.0)
    assert talk.kinds == {"a": Kind.FAILED}


def test_expired_elicitation_is_denied_despite_default_allow() -> None:
    talk = Talk(replace(TELLING, question_seconds=1.0, question_default="allow"))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.mean(
        Requested("form", RequestPurpose.ELICITATION, "elicitation"),
        Requested("may", RequestPurpose.PERMISSION, tool="saw"),
    )
    answers = [data.split()[:3] for data in sent(talk.wait(1.0))]
    assert answers == [[b"A", b"form", b"deny:"], [b"A", b"may", b"allow:"]]


def test_reconfiguration_ends_backoff() -> None:
    talk = Talk(TELLING)
    for name in "abc":
        talk.ask(ask(name, NORMAL))
        talk.die(code=1)
        talk.wait(60.0) if name == "a" else None
    talk.ask(B)
    assert talk.waits_for(Timer.BACKOFF)
    assert of(StartProcess, talk.tell(Reconfigured(talk.at, TELLING, True)))


@pytest.mark.parametrize("result", ["success", "failed"])
def test_compaction_ends_when_it_failed(result: str) -> None:
    begun = b'{"type":"system","subtype":"status","status":"compacting"}'
    over = b'{"type":"system","subtype":"status","status":null,"compact_result":"%s"}' % result.encode()
    assert CLAUDE.read(begun) == ToolBegan(("compaction",))
    assert CLAUDE.read(over) == ToolEnded(("compaction",))
