"""Questions and callbacks of the agent: each request gets exactly one answer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.dialect import DENIED, Decision, Verdict
from banksman.core.dialects.meaning import Requested, RequestPurpose, RequestWithdrawn
from banksman.core.session import event as kinds
from banksman.core.session import permissions
from banksman.core.session.ask_queue import INTERACTIVE, NORMAL
from banksman.core.session.effects import (
    AskHuman,
    CallBack,
    CloseCallback,
    CloseQuestion,
    Effect,
    GiveReceipt,
    StopProcess,
    TellAnswer,
)
from banksman.core.session.facts import (
    AppendFailed,
    CallbackAnswered,
    InterruptAsked,
    QuestionAnswered,
    Reconfigured,
    Timer,
)
from banksman.core.session.outcome import By, Kind
from banksman.core.session.permissions import Rules
from banksman.core.session.questions import CALLBACKS_MAX, QUESTIONS_MAX
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase, Session, Store
from banksman.core.session.turn import Ask
from banksman.errors import StoreError

ALLOWED = Decision(allows=True)
FULL = StoreError("the disk is full")
A = ask("a", NORMAL)


def asks(request: str = "q", tool: str = "Bash", wants: RequestPurpose = RequestPurpose.PERMISSION) -> Requested:
    return Requested(request, wants, "can_use_tool", tool)


def running(config: Config = TELLING, first: Ask = A) -> Talk:
    """Open a turn of one ask."""
    talk = Talk(config)
    talk.ask(first)
    talk.begin()
    talk.opens(first.ref)
    return talk


def answers(effects: list[Effect]) -> list[str]:
    """Frames to the agent, except for prompts and interrupts."""
    return [data.decode().strip() for data in sent(effects) if data[:1] in b"AVCR"]


# -- a caller answers ------------------------------------------------------------------------------------------------
def test_question_is_logged_answered_once_and_closed() -> None:
    talk = running()
    effects = talk.mean(asks())
    assert of(AskHuman, effects) == [AskHuman(talk.named(), asks(), "a")]
    assert answers(effects) == []
    effects = talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED))
    assert answers(effects) == ["A q allow: None"]
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    [asked], [answered] = talk.logged(kinds.QUESTION_ASKED), talk.logged(kinds.QUESTION_ANSWERED)
    assert (asked["request"], asked["wants"], asked["tool"]) == ("q", "permission", "Bash")
    assert answered == {"question": asked["question"], "answer": "allow", "by": "answer", "message": None}
    # A second answer is late, whatever it says.
    assert talk.tell(QuestionAnswered(0.0, talk.named(), DENIED)) == []
    assert talk.tell(QuestionAnswered(0.0, "nobody asked", ALLOWED)) == []


def test_answer_is_acknowledged_only_when_durable() -> None:
    talk = running()
    talk.mean(asks())
    talk.is_log_slow = True
    effects = talk.tell(QuestionAnswered(0.0, talk.named(), Decision(allows=False, message="no")))
    assert not of(TellAnswer, effects)
    assert of(TellAnswer, talk.commit()) == [TellAnswer(talk.named(), "deny", "answer", "no")]


def test_answer_lost_by_log_is_reported_as_lost() -> None:
    talk = running()
    talk.mean(asks())
    talk.is_log_slow = True
    talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED))
    effects = talk.tell(AppendFailed(0.0, FULL))
    assert of(TellAnswer, effects) == [TellAnswer(talk.named(), "allow", "answer", None, FULL)]


def test_failed_log_ends_questions_at_once() -> None:
    """The process is stopping: it cannot read an answer, and the log cannot store one."""
    talk = running()
    talk.mean(asks())
    talk.is_log_slow = True
    talk.hear(b"text more")
    effects = talk.tell(AppendFailed(0.0, FULL))
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    assert of(TellAnswer, effects) == [TellAnswer(talk.named(), "withdrawn", "store", None, FULL)]
    assert talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED)) == []


def test_question_name_is_unique_across_processes() -> None:
    talk = running()
    asked: list[str] = []
    for name in "bcd":
        talk.mean(asks())
        asked.append(talk.named())
        talk.die(code=1)
        # The next process uses the same request id. A caller that saw the previous question answers now.
        talk.wait(1e3)
        talk.ask(ask(name, NORMAL))
        talk.begin()
        talk.opens(f"{name}0000")
        talk.mean(asks())
        assert talk.named() not in asked
        assert talk.tell(QuestionAnswered(0.0, asked[-1], ALLOWED)) == []
        talk.mean(RequestWithdrawn("q"))
    assert len({*asked}) == 3
    assert [name.split(".")[0] for name in asked] == ["q-1", "q-2", "q-3"]


@pytest.mark.parametrize("how", ["the log fails", "the host dies"])
def test_question_name_lost_by_log_is_never_reused(how: str) -> None:
    """A caller has seen the question, and may answer when another question takes its place in the log."""
    talk = running()
    talk.is_log_slow = True
    durable = talk.state.committed
    talk.hear(*[b"text and more"] * 50)
    talk.mean(asks())
    lost = talk.named()
    place = int(lost.rpartition(".")[2])
    assert place > durable + 50
    if how == "the log fails":
        talk.tell(AppendFailed(0.0, FULL))
        talk.is_log_slow = False
        talk.die(signal=15)
        talk.wait(1.0)
    else:
        epoch = talk.epoch
        talk = Talk(TELLING, Session(config=TELLING, head=durable, committed=durable))
        talk.epoch = epoch  # The store never gives an epoch twice.
    talk.ask(ask("b", NORMAL))
    talk.begin()
    talk.opens("b0000")
    talk.hear(*[b"text"] * (place - 2 - talk.state.head))
    talk.mean(asks())
    assert int(talk.named().rpartition(".")[2]) == place
    assert talk.named() != lost
    assert talk.tell(QuestionAnswered(0.0, lost, ALLOWED)) == []


def test_stopping_process_asks_no_more_questions() -> None:
    """After the log returned, new questions of the process would get the places of the lost ones in the log."""
    talk = running()
    talk.is_log_slow = True
    talk.mean(asks("lost"))
    talk.tell(AppendFailed(0.0, FULL))
    talk.is_log_slow = False
    talk.wait(1.0)
    assert talk.state.process.phase is ProcessPhase.STOPPING
    assert talk.state.store is Store.WORKING
    assert not of(AskHuman, talk.mean(asks("again")))
    assert not talk.state.questions


def test_elicitation_is_asked_regardless_of_rules() -> None:
    talk = running(replace(TELLING, rules=(("*", Verdict.ALLOW),)))
    assert len(of(AskHuman, talk.mean(asks(wants=RequestPurpose.ELICITATION)))) == 1


def test_unknown_request_is_refused_and_named() -> None:
    talk = running()
    effects = talk.mean(Requested("q", RequestPurpose.UNKNOWN, "sing"))
    assert answers(effects) == ["R q Banksman does not answer 'sing'"]
    assert not talk.state.questions


def test_question_outside_turns_survives_interrupt() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    assert of(AskHuman, talk.mean(asks())) == [AskHuman(talk.named(), asks(), None)]
    # An interrupt of a turn does not affect it.
    talk.ask(ask("b", NORMAL))
    talk.opens("b0000")
    effects = talk.tell(InterruptAsked(0.0, "b", "i"))
    assert of(CloseQuestion, effects) == []
    assert answers(talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED))) == ["A q allow: None"]


def test_withdrawn_question_needs_no_answer() -> None:
    talk = running()
    talk.mean(asks())
    effects = talk.mean(RequestWithdrawn("q"))
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    assert answers(effects) == []
    assert [body["answer"] for body in talk.logged(kinds.QUESTION_ANSWERED)] == ["withdrawn"]
    assert talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED)) == []
    # A withdrawal of an unknown question has no effect.
    assert not of(CloseQuestion, talk.mean(RequestWithdrawn("other")))


def test_stopping_turn_closes_its_questions_and_takes_no_more() -> None:
    talk = running()
    talk.mean(asks())
    effects = talk.tell(InterruptAsked(0.0, "a", "i"))
    # The interrupt comes first. An agent that reads "cancelled" before it takes that as an answer and continues.
    assert sent(effects) == [b"I interrupt-a#1-1\n", b"R q cancelled\n"]
    assert answers(talk.mean(asks("later"))) == ["R later cancelled"]
    assert not talk.state.questions


def test_questions_beyond_maximum_are_refused() -> None:
    talk = running()
    talk.mean(*(asks(f"q{number}") for number in range(QUESTIONS_MAX)))
    assert len(talk.state.questions) == QUESTIONS_MAX
    effects = talk.mean(asks("one more"))
    assert answers(effects) == ["R one more too many questions are open"]
    assert not of(AskHuman, effects)
    talk.tell(QuestionAnswered(0.0, talk.named("q7"), DENIED))
    assert len(of(AskHuman, talk.mean(asks("another")))) == 1


def test_questions_end_with_their_process() -> None:
    talk = running()
    talk.mean(asks())
    effects = talk.die(code=1)
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    assert [body["answer"] for body in talk.logged(kinds.QUESTION_ANSWERED)] == ["withdrawn"]
    assert talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED)) == []


def test_question_outside_turns_ends_with_its_process() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    talk.mean(asks())
    assert of(CloseQuestion, talk.die(code=1)) == [CloseQuestion(talk.named())]
    talk.serve(ask("b", NORMAL))
    assert talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED)) == []


# -- rules decide ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("session", "of_ask", "answer"),
    [
        ((("Bash", Verdict.ALLOW),), (), "A q allow: None"),
        ((("Bash", Verdict.DENY),), (), "A q deny: denied by a rule"),
        ((("Bash", Verdict.ASK),), (), None),
        ((("Read", Verdict.DENY),), (), None),
        ((("*", Verdict.DENY),), (("Bash", Verdict.ALLOW),), "A q allow: None"),
        ((("*", Verdict.ALLOW),), (("Bash", Verdict.DENY),), "A q deny: denied by a rule"),
        ((("*", Verdict.ALLOW),), (("*", Verdict.ASK),), None),
    ],
)
def test_rule_answers_permission(session: Rules, of_ask: Rules, answer: str | None) -> None:
    talk = running(replace(TELLING, rules=session, question_seconds=5.0), replace(A, rules=of_ask))
    effects = talk.mean(asks())
    if answer is None:
        assert len(of(AskHuman, effects)) == 1
        assert answers(effects) == []
        return
    assert answers(effects) == [answer]
    assert not of(AskHuman, effects)
    assert not talk.waits_for(Timer.QUESTION)
    # The log has the question and the answer, with the source of the answer.
    assert len(talk.logged(kinds.QUESTION_ASKED)) == 1
    assert [body["by"] for body in talk.logged(kinds.QUESTION_ANSWERED)] == ["rule"]


@pytest.mark.parametrize(
    ("session", "of_ask", "verdict"),
    [
        ((), (), "None"),
        ((("Bash", Verdict.ALLOW),), (), "allow"),
        ((("Bash", Verdict.DENY),), (), "deny"),
        ((("Bash", Verdict.ASK),), (), "ask"),
        ((("*", Verdict.ALLOW),), (("Bash", Verdict.DENY),), "deny"),
    ],
)
def test_ruling_is_answered_at_once_without_question(session: Rules, of_ask: Rules, verdict: str) -> None:
    talk = running(replace(TELLING, rules=session), replace(A, rules=of_ask))
    effects = talk.mean(asks(wants=RequestPurpose.RULING))
    assert answers(effects) == [f"V q {verdict}"]
    assert not of(AskHuman, effects)
    assert not talk.state.questions


@pytest.mark.parametrize("session", [(), (("*", Verdict.ALLOW),)])
def test_ruling_without_tool_name_denies(session: Rules) -> None:
    """The request was too large to read, so no rule can match. An unanswered hook would allow the call."""
    talk = running(replace(TELLING, rules=session))
    assert answers(talk.mean(asks(tool="", wants=RequestPurpose.RULING))) == ["V q deny"]


def test_rules_of_ask_apply_to_its_turn_only() -> None:
    talk = running(TELLING, replace(A, rules=(("Bash", Verdict.DENY),)))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    talk.ask(ask("b", NORMAL))
    talk.opens("b0000")
    assert answers(talk.mean(asks(wants=RequestPurpose.RULING))) == ["V q None"]
    # The rules do not apply to an agent-initiated turn either.
    talk.hear(b"over b0000 b0000", b"settled b0000", b"own")
    assert answers(talk.mean(asks("r", wants=RequestPurpose.RULING))) == ["V r None"]


# -- no answer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("default", ["allow", "deny"])
def test_question_gets_default_answer_when_it_expires(default: str) -> None:
    talk = running(replace(TELLING, question_seconds=5.0, question_default=default))
    talk.mean(asks())
    assert answers(talk.wait(4.9)) == []
    effects = talk.wait(0.1)
    assert answers(effects) == [f"A q {default}: no answer within 5 s"]
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    assert [body["by"] for body in talk.logged(kinds.QUESTION_ANSWERED)] == ["expiry"]
    assert talk.tell(QuestionAnswered(9.0, talk.named(), ALLOWED)) == []


def test_answered_question_does_not_expire() -> None:
    talk = running(replace(TELLING, question_seconds=5.0))
    talk.mean(asks())
    talk.tell(QuestionAnswered(0.0, talk.named(), ALLOWED))
    assert not talk.waits_for(Timer.QUESTION)
    assert talk.fire((Timer.QUESTION, talk.named())) == []


def test_question_without_limit_does_not_expire() -> None:
    talk = running()
    talk.mean(asks())
    assert not talk.waits_for(Timer.QUESTION)
    talk.wait(1e6)
    assert len(talk.state.questions) == 1


def test_reopened_session_without_limit_lets_questions_wait() -> None:
    talk = running(replace(TELLING, question_seconds=5.0))
    talk.mean(asks())
    talk.tell(Reconfigured(1.0, TELLING, False))
    assert answers(talk.wait(10.0)) == []
    assert answers(talk.tell(QuestionAnswered(9.0, talk.named(), ALLOWED))) == ["A q allow: None"]


# -- a denial that interrupts ----------------------------------------------------------------------------------------
STOPS = Decision(allows=False, message="stop", interrupts=True)


def test_denial_with_interrupt_ends_turn_by_boundary() -> None:
    talk = running()
    talk.mean(asks())
    effects = talk.tell(QuestionAnswered(0.0, talk.named(), STOPS))
    assert sent(effects) == [b"A q deny and stop: stop\n", b"I interrupt-a#1-1\n"]
    assert of(CloseQuestion, effects) == [CloseQuestion(talk.named())]
    talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"cancelled a0000")
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    [ended] = talk.logged(kinds.TURN_ENDED)
    assert ended["by"] == By.BOUNDARY
    assert not of(StopProcess, talk.effects)


def test_agent_that_ignores_interrupting_denial_is_ended_by_ladder() -> None:
    talk = running()
    talk.mean(asks())
    talk.tell(QuestionAnswered(0.0, talk.named(), STOPS))
    talk.hear(b"ok interrupt-a#1-1", b"text going on")
    assert not of(StopProcess, talk.wait(4.9))
    assert of(StopProcess, talk.wait(0.1)) == [StopProcess(1)]
    talk.die(signal=15)
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    [ended] = talk.logged(kinds.TURN_ENDED)
    assert ended["by"] == By.LADDER


def test_interrupting_denial_of_answered_question_is_ignored() -> None:
    talk = running()
    talk.mean(asks())
    talk.tell(QuestionAnswered(0.0, talk.named(), DENIED))
    assert talk.tell(QuestionAnswered(0.0, talk.named(), STOPS)) == []


def test_question_of_background_task_outlives_turn_and_stops_no_other() -> None:
    """The question belongs to a background task, which began in that turn and continues."""
    talk = running()
    talk.mean(asks("late"))
    assert answers(talk.hear(b"over a0000 a0000", b"settled a0000")) == []
    talk.ask(ask("b", NORMAL))
    talk.opens("b0000")
    effects = talk.tell(QuestionAnswered(0.0, talk.named("late"), STOPS))
    assert answers(effects) == ["A late deny and stop: stop"]
    assert talk.kinds == {"a": Kind.DONE}
    talk.over("b0000")
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}


def test_interrupt_after_interrupting_denial_gets_receipt() -> None:
    talk = running()
    talk.mean(asks())
    talk.tell(QuestionAnswered(0.0, talk.named(), STOPS))
    talk.tell(InterruptAsked(0.0, "a", "i"))
    talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"cancelled a0000")
    [given] = of(GiveReceipt, talk.effects)
    assert given.receipt.stopped


# -- callbacks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wants", [RequestPurpose.HOOK, RequestPurpose.TOOL])
def test_callback_is_called_and_its_result_sent_once(wants: RequestPurpose) -> None:
    talk = running()
    effects = talk.mean(asks("c", "h", wants))
    assert of(CallBack, effects) == [CallBack(1, asks("c", "h", wants))]
    assert answers(effects) == []
    # A repeated request does not call it again.
    assert not of(CallBack, talk.mean(asks("c", "h", wants)))
    effects = talk.tell(CallbackAnswered(0.0, 1, "c", {"x": 1}))
    assert answers(effects) == ["C c {'x': 1}"]
    assert talk.tell(CallbackAnswered(0.0, 1, "c", {"x": 2})) == []
    assert not talk.state.callbacks


def test_failed_callback_is_refused_with_its_reason() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    assert answers(talk.tell(CallbackAnswered(0.0, 1, "c", None, "it raised"))) == ["R c it raised"]


def test_empty_callback_answer_is_sent() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    assert answers(talk.tell(CallbackAnswered(0.0, 1, "c", {}))) == ["C c {}"]


def test_callbacks_beyond_maximum_are_refused() -> None:
    talk = running()
    talk.mean(*(asks(f"c{number}", "h", RequestPurpose.HOOK) for number in range(CALLBACKS_MAX)))
    assert len(of(CallBack, talk.effects)) == CALLBACKS_MAX
    effects = talk.mean(asks("more", "h", RequestPurpose.TOOL))
    assert answers(effects) == ["R more too many callbacks are running"]
    assert not of(CallBack, effects)
    talk.tell(CallbackAnswered(0.0, 1, "c3", {}))
    assert len(of(CallBack, talk.mean(asks("again", "h", RequestPurpose.TOOL)))) == 1


def test_withdrawn_callback_is_closed_and_its_answer_dropped() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    assert of(CloseCallback, talk.mean(RequestWithdrawn("c"))) == [CloseCallback("c")]
    assert talk.tell(CallbackAnswered(0.0, 1, "c", {})) == []


def test_callback_of_dead_process_is_closed_and_its_answer_dropped() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    assert of(CloseCallback, talk.die(code=1)) == [CloseCallback("c")]
    talk.ask(ask("b", NORMAL))
    talk.begin()
    assert talk.state.process.number == 2
    assert talk.tell(CallbackAnswered(0.0, 1, "c", {})) == []


def test_late_callback_answer_does_not_reach_same_request_of_next_process() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    talk.die(code=1)
    talk.ask(ask("b", NORMAL))
    talk.begin()
    talk.opens("b0000")
    assert of(CallBack, talk.mean(asks("c", "h", RequestPurpose.HOOK))) == [
        CallBack(2, asks("c", "h", RequestPurpose.HOOK))
    ]
    assert talk.tell(CallbackAnswered(0.0, 1, "c", {"late": True})) == []
    assert answers(talk.tell(CallbackAnswered(0.0, 2, "c", {}))) == ["C c {}"]


def test_callback_outlives_its_turn() -> None:
    """The agent may still wait for it: a hook at the end of a turn, a background task."""
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK))
    effects = talk.hear(b"over a0000 a0000", b"settled a0000")
    assert not of(CloseCallback, effects)
    assert answers(talk.tell(CallbackAnswered(0.0, 1, "c", {}))) == ["C c {}"]


def test_stopping_process_gets_no_answers() -> None:
    talk = running()
    talk.mean(asks("c", "h", RequestPurpose.HOOK), asks())
    talk.ask(replace(ask("u", INTERACTIVE)))
    talk.wait(5.0)
    assert len(of(StopProcess, talk.effects)) == 1
    assert answers(talk.tell(CallbackAnswered(5.0, 1, "c", {}))) == []
    assert answers(talk.mean(asks("late"))) == []


# -- workspace requests ------------------------------------------------------------------------------------------------
RUN = Requested("7", RequestPurpose.WORKSPACE, "terminal/create", "execute", {"command": "make"})


def _serving(verdict: str) -> Talk:
    talk = Talk(replace(TELLING, rules=permissions.parse({"execute": verdict})))
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    return talk


def test_workspace_request_is_refused_when_rule_denies() -> None:
    effects = _serving("deny").mean(RUN)
    assert not of(CallBack, effects)
    (refused,) = sent(effects)
    assert refused.startswith(b"R 7 a rule")


def test_workspace_request_runs_when_rule_allows_or_is_absent() -> None:
    assert of(CallBack, _serving("allow").mean(RUN))
    talk = _serving("deny")
    assert of(CallBack, talk.mean(replace(RUN, tool="read"), replace(RUN, request="8", tool="")))


@pytest.mark.parametrize("allows", [True, False])
def test_workspace_request_waits_for_answer_when_rule_asks(allows: bool) -> None:
    talk = _serving("ask")
    (asked,) = of(AskHuman, talk.mean(RUN))
    assert (asked.asked.wants, asked.asked.tool) == (RequestPurpose.PERMISSION, "execute")
    (body,) = talk.logged(kinds.QUESTION_ASKED)
    assert body["wants"] == "permission"
    effects = talk.tell(QuestionAnswered(talk.at, asked.question, Decision(allows=allows, message="not now")))
    assert bool(of(CallBack, effects)) is allows
    assert sent(effects) == ([] if allows else [b"R 7 not now\n"])
