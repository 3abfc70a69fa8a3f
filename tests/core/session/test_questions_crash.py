"""Questions kept through a crash: shown again, answered, and the answer used when the agent asks the same again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session.histories import Told, open_talk
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, of

from banksman.core.dialects.dialect import Decision, Verdict
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session import crash_recovery, questions
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import AskHuman, CloseQuestion, TellAnswer
from banksman.core.session.event import Entry, entry
from banksman.core.session.facts import AppendFailed, Begun, QuestionAnswered
from banksman.core.session.history import OpenQuestion, SessionHistory
from banksman.core.wire.elided_text import REDACTED
from banksman.errors import StoreError

FULL = StoreError("the disk is full")
SAW = Requested("r-1", RequestPurpose.PERMISSION, "can_use_tool", "saw", {"depth": 3})


def opened(policy: str | None) -> list[Entry]:
    options = {} if policy is None else {"question_after_crash": policy}
    return [entry(None, kinds.SESSION_OPENED, options=options, resume=None, fork=False)]


def crashed(policy: str | None) -> SessionHistory:
    """A session whose host died while its agent waited for an answer, as the next host finds it."""
    talk = open_talk(before=[opened(policy)])
    # The talk opens the session once more, without options: the last opening counts.
    talk.appends.append(opened(policy))
    talk.state = replace(talk.state, head=talk.state.head + 1, committed=talk.state.head + 1)
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    talk.mean(SAW)
    past = pasts.beginning(TELLING)
    for append in talk.appends:
        past = pasts.fold(past, append)
    assert [question.id for question in past.questions] == [talk.named("r-1")]
    return pasts.fold(past, crash_recovery.settle(past))


def named(past: SessionHistory) -> str:
    """Return the id of the kept question."""
    [question] = past.questions
    return question.id


def resumed(past: SessionHistory) -> Told:
    talk = Told(past)
    talk.state = replace(talk.state, kept=questions.kept(past))
    return talk


def asks_again(talk: Told, asked: Requested) -> None:
    talk.ask(ask("b", NORMAL))
    talk.begin()
    talk.opens("b0000")
    talk.mean(asked)


def requests(talk: Told) -> list[str]:
    """Return the request ids of the open questions."""
    return [question.asked.request for question in talk.state.questions]


def logged(talk: Told, kind: str) -> list[dict[str, object]]:
    return [
        pasts.Event("", 0, 0, 0.0, turn, name, data).body
        for append in talk.appends
        for turn, name, data in append
        if name == kind
    ]


@pytest.mark.parametrize("policy", [None, "withdraw"])
def test_question_is_withdrawn_by_crash_without_keep_policy(policy: str | None) -> None:
    past = crashed(policy)
    assert past.questions == ()
    assert questions.kept(past) == ()


def test_kept_question_survives_crashes_and_snapshot() -> None:
    past = crashed("keep")
    assert [(question.turn, question.is_kept) for question in past.questions] == [(None, True)]
    assert crash_recovery.settle(past) == []
    assert pasts.decode(pasts.encode(past), TELLING) == past
    [kept] = questions.kept(past)
    assert kept.id == named(past)
    assert kept.asked == replace(SAW, subtype="")


def test_kept_question_is_shown_again_and_answers_same_request() -> None:
    past = crashed("keep")
    talk, kept = resumed(past), named(past)
    [shown] = of(AskHuman, talk.tell(Begun(0.0)))
    assert (shown.question, shown.asked.tool) == (kept, "saw")
    effects = talk.tell(QuestionAnswered(0.0, kept, Decision(allows=True)))
    assert of(CloseQuestion, effects) == [CloseQuestion(kept)]
    assert of(TellAnswer, effects) == [TellAnswer(kept, "allow", "answer")]
    assert [body["question"] for body in logged(talk, kinds.QUESTION_ANSWERED)] == [kept]
    # A second answer, or another question, does not belong to this one, even if the next process uses the same request
    # id.
    assert not of(TellAnswer, talk.tell(QuestionAnswered(0.0, kept, Decision(allows=False))))
    asks_again(talk, SAW)
    answered = [(body["question"], body["answer"], body["by"]) for body in logged(talk, kinds.QUESTION_ANSWERED)]
    assert answered == [(kept, "allow", "answer"), (talk.named("r-1"), "allow", "kept")]
    assert talk.named("r-1") != kept
    assert talk.state.questions == ()
    # The kept answer is used only once.
    talk.mean(replace(SAW, request="r-3"))
    assert requests(talk) == ["r-3"]


def test_kept_question_of_old_log_has_name_of_agent() -> None:
    about = {"wants": "permission", "tool": "saw", "input": {"depth": 3}, "details": {}}
    asked = entry(None, kinds.QUESTION_ASKED, question="theirs", **about)
    past = pasts.fold(pasts.beginning(TELLING), [*opened("keep"), asked])
    past = pasts.fold(past, crash_recovery.settle(past))
    [kept] = questions.kept(past)
    assert (kept.id, kept.asked.request, kept.asked.tool) == ("theirs", "theirs", "saw")
    effects = resumed(past).tell(QuestionAnswered(0.0, "theirs", Decision(allows=True)))
    assert of(CloseQuestion, effects) == [CloseQuestion("theirs")]


def test_kept_question_waits_on_when_log_cannot_take_its_answer() -> None:
    past = crashed("keep")
    talk, kept = resumed(past), named(past)
    talk.is_log_slow = True
    talk.tell(QuestionAnswered(0.0, kept, Decision(allows=True)))
    effects = talk.tell(AppendFailed(0.0, FULL))
    # The caller gets the error. The question can be answered again, but only when the log is back.
    assert of(TellAnswer, effects) == [TellAnswer(kept, "allow", "answer", None, FULL)]
    assert [shown.question for shown in of(AskHuman, effects)] == [kept]
    effects = talk.tell(QuestionAnswered(0.0, kept, Decision(allows=False)))
    assert effects == [TellAnswer(kept, "deny", "answer", None, FULL)]
    talk.is_log_slow = False
    talk.wait(1.0)
    effects = talk.tell(QuestionAnswered(0.0, kept, Decision(allows=False)))
    assert of(TellAnswer, effects) == [TellAnswer(kept, "deny", "answer")]


@pytest.mark.parametrize("other", [{"tool": "axe"}, {"input": {"depth": 4}}, {"wants": RequestPurpose.ELICITATION}])
def test_kept_answer_does_not_apply_to_different_question(other: dict[str, object]) -> None:
    past = crashed("keep")
    talk = resumed(past)
    talk.tell(QuestionAnswered(0.0, named(past), Decision(allows=True)))
    asks_again(talk, replace(SAW, request="r-2", **other))
    assert requests(talk) == ["r-2"]
    assert len(talk.state.kept) == 1


def test_kept_question_is_replaced_when_agent_asks_again() -> None:
    past = crashed("keep")
    talk = resumed(past)
    asks_again(talk, replace(SAW, request="r-2"))
    assert requests(talk) == ["r-2"]
    assert talk.state.kept == ()
    assert logged(talk, kinds.QUESTION_ANSWERED)[-1] == {
        "question": named(past),
        "answer": "withdrawn",
        "by": "asked again",
        "message": None,
    }
    talk.tell(QuestionAnswered(0.0, named(past), Decision(allows=True)))
    assert requests(talk) == ["r-2"]


def test_rule_precedes_kept_answer() -> None:
    past = crashed("keep")
    talk = resumed(past)
    talk.tell(QuestionAnswered(0.0, named(past), Decision(allows=True)))
    talk.ask(replace(ask("b", NORMAL), rules=(("saw", Verdict.DENY),)))
    talk.begin()
    talk.opens("b0000")
    talk.mean(replace(SAW, request="r-2"))
    assert logged(talk, kinds.QUESTION_ANSWERED)[-1]["answer"] == "deny"
    assert talk.state.kept == ()


@pytest.mark.parametrize(("wants", "key"), [("permission", REDACTED), ("elicitation", "plain")])
def test_question_that_cannot_be_recognised_is_withdrawn_by_crash(wants: str, key: str) -> None:
    """A question with a secret cannot be compared. A free-text question may come back in other words."""
    past = crashed("keep")
    about = f'{{"wants":"{wants}","tool":"saw","input":{{"key":"{key}"}},"details":{{}}}}'
    past = replace(past, questions=(OpenQuestion("q-9", None, about),))
    assert pasts.fold(past, crash_recovery.settle(past)).questions == ()
