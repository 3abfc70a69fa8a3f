"""Questions that outlive the process that asked them: kept through a crash, if that is the session's policy.

The process that waited for the answer is gone, so an answer has nowhere to go. But the one who was to give it may still
be looking at the question, and the agent, resumed, is likely to ask the same again. So a kept question is shown and can
be answered, and the answer is for the next request that wants the same, of the same tool, with the same input: it is
given at once, and used up, unless a rule says otherwise by then. If the agent asks before anybody has answered, it is a
question like any other, under a name of its own, and the kept one is over. A kept question keeps its name. An answer is
remembered by the host that took it, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from banksman.core import event as kinds
from banksman.core.decision import Decision
from banksman.core.meaning import Requested, Wants
from banksman.core.past import OpenQuestion, Past
from banksman.core.session_effects import AskHuman, CloseQuestion, TellAnswer
from banksman.core.state import Kept, Store
from banksman.core.work import Work


def kept(past: Past) -> tuple[Kept, ...]:
    """Those of a session that is taken over."""
    return tuple(Kept(question.id, requested(question)) for question in past.questions if question.is_kept)


def is_about_a_tool(question: OpenQuestion) -> bool:
    """Only of those can be told whether another is the same: what a user is to enter is asked in words."""
    return bool(msgspec.json.decode(question.about)["wants"] == Wants.PERMISSION)


def requested(question: OpenQuestion) -> Requested:
    about: dict[str, Any] = msgspec.json.decode(question.about)
    return Requested(
        # Before we had names of our own for questions, theirs was the agent's.
        request=about.get("request", question.id),
        wants=Wants(about["wants"]),
        tool=about["tool"],
        input=about["input"],
        details=about["details"],
    )


def show(work: Work) -> None:
    """To whoever answers questions now."""
    for question in work.state.kept:
        work.do(AskHuman(question.id, question.asked, None))


def answer(work: Work, id: str, decision: Decision) -> bool:
    """Whether it was one of these."""
    found = next((question for question in work.state.kept if question.id == id), None)
    if found is None or found.decision is not None:
        return found is not None
    if work.state.store is not Store.WORKING:
        # Nobody waits for this answer yet, so nothing is lost if it is given when the log is back.
        work.do(TellAnswer(id, decision.word, decision.by, decision.message, work.state.store_error))
        return True
    _replace(work, found, [replace(found, decision=decision)])
    _end(work, found, decision.word, decision.by, decision.message)
    return True


def _end(work: Work, question: Kept, answer: str, by: str, message: str | None = None) -> None:
    work.log(None, kinds.QUESTION_ANSWERED, question=question.id, answer=answer, by=by, message=message)
    work.do(CloseQuestion(question.id))
    work.after_commit(TellAnswer(question.id, answer, by, message))


def reopen(work: Work, id: str) -> None:
    """The log has lost its answer, and whoever gave it was told so: it waits again."""
    found = next((question for question in work.state.kept if question.id == id), None)
    if found is not None:
        _replace(work, found, [replace(found, decision=None)])
        work.do(AskHuman(found.id, found.asked, None))


def decision_for(work: Work, asked: Requested) -> Decision | None:
    """What was answered, if this is what was asked then."""
    found = next((question for question in work.state.kept if _is_same(question.asked, asked)), None)
    if found is None:
        return None
    _replace(work, found, [])
    if found.decision is None:
        _end(work, found, "withdrawn", "asked again")
        return None
    return replace(found.decision, by="kept")


def _is_same(kept: Requested, asked: Requested) -> bool:
    return (kept.wants, kept.tool, kept.input) == (asked.wants, asked.tool, asked.input)


def _replace(work: Work, found: Kept, by: Iterable[Kept]) -> None:
    work.set(kept=(*(question for question in work.state.kept if question is not found), *by))
