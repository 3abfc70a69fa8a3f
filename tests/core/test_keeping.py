"""Questions that are kept through a crash: shown again, answered, and the answer given when the same is asked again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.histories import Told, open_talk
from tests.core.scenarios import ask
from tests.core.talk import TELLING, of

from banksman.core import event as kinds
from banksman.core import keeping, settling
from banksman.core import past as pasts
from banksman.core.arbiter import NORMAL
from banksman.core.decision import Decision
from banksman.core.event import Entry, entry
from banksman.core.meaning import Requested, Wants
from banksman.core.past import OpenQuestion, Past
from banksman.core.redaction import REDACTED
from banksman.core.rules import Verdict
from banksman.core.session_facts import AskHuman, Begun, CloseQuestion, QuestionAnswered

SAW = Requested("q-1", Wants.PERMISSION, "can_use_tool", "saw", {"depth": 3})


def opened(policy: str | None) -> list[Entry]:
    options = {} if policy is None else {"question_after_crash": policy}
    return [entry(None, kinds.SESSION_OPENED, options=options, resume=None, fork=False)]


def crashed(policy: str | None) -> Past:
    """A session whose host died while its agent waited for an answer, as the next one finds it."""
    talk = open_talk(before=[opened(policy)])
    # The talk opens it once more, without options: what was opened last counts.
    talk.appends.append(opened(policy))
    talk.state = replace(talk.state, head=talk.state.head + 1, committed=talk.state.head + 1)
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    talk.mean(SAW)
    past = pasts.beginning(TELLING)
    for append in talk.appends:
        past = pasts.fold(past, append)
    assert [question.id for question in past.questions] == ["q-1"]
    return pasts.fold(past, settling.settle(past))


def resumed(past: Past) -> Told:
    talk = Told(past)
    talk.state = replace(talk.state, kept=keeping.kept(past))
    return talk


def asks_again(talk: Told, asked: Requested) -> None:
    talk.ask(ask("b", NORMAL))
    talk.begin()
    talk.opens("b0000")
    talk.mean(asked)


def logged(talk: Told, kind: str) -> list[dict[str, object]]:
    return [
        pasts.Event("", 0, 0, 0.0, turn, name, data).body
        for append in talk.appends
        for turn, name, data in append
        if name == kind
    ]


@pytest.mark.parametrize("policy", [None, "withdraw"])
def test_without_the_policy_it_is_withdrawn(policy: str | None) -> None:
    past = crashed(policy)
    assert past.questions == ()
    assert keeping.kept(past) == ()


def test_it_is_kept_through_one_crash_after_another_and_through_a_snapshot() -> None:
    past = crashed("keep")
    assert [(question.id, question.turn, question.is_kept) for question in past.questions] == [("q-1", None, True)]
    assert settling.settle(past) == []
    assert pasts.decode(pasts.encode(past), TELLING) == past
    [kept] = keeping.kept(past)
    assert (kept.asked.tool, kept.asked.input, kept.asked.wants) == (SAW.tool, SAW.input, SAW.wants)


def test_it_is_shown_again_and_its_answer_is_given_when_the_same_is_asked() -> None:
    talk = resumed(crashed("keep"))
    [shown] = of(AskHuman, talk.tell(Begun(0.0)))
    assert shown.asked.request == "q-1"
    effects = talk.tell(QuestionAnswered(0.0, "q-1", Decision(allows=True)))
    assert of(CloseQuestion, effects) == [CloseQuestion("q-1")]
    assert [body["question"] for body in logged(talk, kinds.QUESTION_ANSWERED)] == ["q-1"]
    # A second answer, and another question, are not this one's.
    talk.tell(QuestionAnswered(0.0, "q-1", Decision(allows=False)))
    asks_again(talk, replace(SAW, request="q-2"))
    answered = [(body["question"], body["answer"], body.get("by")) for body in logged(talk, kinds.QUESTION_ANSWERED)]
    assert answered == [("q-1", "allow", "answer"), ("q-2", "allow", "kept")]
    assert talk.state.questions == ()
    # It is used up.
    talk.mean(replace(SAW, request="q-3"))
    assert [question.id for question in talk.state.questions] == ["q-3"]


@pytest.mark.parametrize("other", [{"tool": "axe"}, {"input": {"depth": 4}}, {"wants": Wants.ELICITATION}])
def test_what_is_not_the_same_is_a_question_of_its_own(other: dict[str, object]) -> None:
    talk = resumed(crashed("keep"))
    talk.tell(QuestionAnswered(0.0, "q-1", Decision(allows=True)))
    asks_again(talk, replace(SAW, request="q-2", **other))
    assert [question.id for question in talk.state.questions] == ["q-2"]
    assert len(talk.state.kept) == 1


def test_asked_again_before_it_was_answered_it_is_the_new_one_that_waits() -> None:
    talk = resumed(crashed("keep"))
    asks_again(talk, replace(SAW, request="q-2"))
    assert [question.id for question in talk.state.questions] == ["q-2"]
    assert talk.state.kept == ()
    assert logged(talk, kinds.QUESTION_ANSWERED)[-1] == {
        "question": "q-1",
        "answer": "withdrawn",
        "by": "asked again",
    }
    talk.tell(QuestionAnswered(0.0, "q-1", Decision(allows=True)))
    assert [question.id for question in talk.state.questions] == ["q-2"]


def test_what_a_rule_says_now_comes_before_what_somebody_said_then() -> None:
    talk = resumed(crashed("keep"))
    talk.tell(QuestionAnswered(0.0, "q-1", Decision(allows=True)))
    talk.ask(replace(ask("b", NORMAL), rules=(("saw", Verdict.DENY),)))
    talk.begin()
    talk.opens("b0000")
    talk.mean(replace(SAW, request="q-2"))
    assert logged(talk, kinds.QUESTION_ANSWERED)[-1]["answer"] == "deny"
    assert talk.state.kept == ()


@pytest.mark.parametrize(("wants", "key"), [("permission", REDACTED), ("elicitation", "plain")])
def test_what_cannot_be_known_again_is_withdrawn(wants: str, key: str) -> None:
    """One with a secret in it; and one in words, to which another that is asked in other words would be the same."""
    past = crashed("keep")
    about = f'{{"wants":"{wants}","tool":"saw","input":{{"key":"{key}"}},"details":{{}}}}'
    past = replace(past, questions=(OpenQuestion("q-9", None, about),))
    assert pasts.fold(past, settling.settle(past)).questions == ()
