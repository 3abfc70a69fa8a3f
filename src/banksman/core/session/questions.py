"""Requests of the agent in the state machine: questions and callbacks, and their answers.

A question asks for a permission or an input. A callback runs a hook, a tool, or work in the
session's workspace. Each request gets at most one answer. Rules are applied first. Kept questions,
at the end of this file, outlive the process that asked. `sessions/questions.py` shows the questions
to callers, and `sessions/tools.py` runs the callbacks.

**Names.** The name of a question is the place of its `question.asked` in the log. It consists of
the epoch under which the process was started, and the seq.

- The agent's request ids cannot serve as names: they are unique within one process at most. A late
  answer, from a page that was left open, would answer a question of the next process with that id.
- The seq alone cannot serve either. The log may lose events when it fails or its host dies. Other
  events then get the same seq, after a reader may have seen the name.
- But no epoch is issued twice, and a process whose log has failed asks no further questions.

So a name is valid from the moment that it is visible, in every later process, host and epoch.

**Answers.** Rules are applied immediately. A question waits for an answer as long as the session is
configured to. A callback runs in the caller's process, and its result comes in as a fact. Every
other request is refused, because an agent without an answer waits forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.dialect import Decision, Verdict
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session import event as kinds
from banksman.core.session import permissions
from banksman.core.session.effects import (
    AskHuman,
    CallBack,
    CloseCallback,
    CloseQuestion,
    TellAnswer,
)
from banksman.core.session.facts import CallbackAnswered, Timer
from banksman.core.session.history import OpenQuestion, SessionHistory
from banksman.core.session.state import AgentRequest, KeptQuestion, ProcessPhase, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase

# Limit on questions that wait for an answer.
QUESTIONS_MAX = 64
# Requests that an agent sends only for a tool. So a turn with one of them has used a tool, even if
# no other frame shows it.
_FOR_TOOLS = (RequestPurpose.PERMISSION, RequestPurpose.RULING, RequestPurpose.WORKSPACE)
# Limit on concurrent callbacks.
CALLBACKS_MAX = 64


def on_request(work: Transition, asked: Requested) -> None:
    """Answer a request of the agent, or start to."""
    protocol = work.state.process.protocol
    if protocol is not None and protocol.recites:
        # The agent replays a request of an earlier process, which must not be answered again.
        work.speak(None, lambda protocol: protocol.cancel(asked))
        return
    turn = work.state.speaking
    if turn is not None and asked.wants in _FOR_TOOLS:
        work.set_turn(replace(turn, used_tools=True))
    match asked.wants:
        case RequestPurpose.PERMISSION | RequestPurpose.ELICITATION:
            _ask(work, asked)
        case RequestPurpose.RULING:
            # A call that is too large to be read up to its tool name matches no rule, so it is
            # denied.
            verdict = _verdict(work, asked, work.state.speaking) if asked.tool else Verdict.DENY
            work.speak(work.speaker, lambda protocol: protocol.rule(asked, verdict))
        case RequestPurpose.HOOK | RequestPurpose.TOOL:
            _call_back(work, asked)
        case RequestPurpose.WORKSPACE:
            _serve(work, asked)
        case RequestPurpose.UNKNOWN | RequestPurpose.BUDGET:
            _refuse(work, asked, f"Banksman does not answer {asked.subtype!r}")


def on_withdrawn(work: Transition, request: str) -> None:
    """Close the question or callback that the agent has withdrawn."""
    for question in work.state.questions:
        if question.asked.request == request:
            forget(work, question.id, "withdrawn", by="agent")
    _forget_callback(work, request)


def _serve(work: Transition, asked: Requested) -> None:
    """Apply the rules to work that the agent delegates to its client.

    The agent has not asked for permission, so the rules for that tool are applied here.
    """
    verdict = _verdict(work, asked, work.state.speaking) if asked.tool else None
    match verdict:
        case Verdict.DENY:
            _refuse(work, asked, f"a rule of this session denies {asked.tool!r}")
        case Verdict.ASK:
            _ask(work, asked)
        case _:
            _call_back(work, asked)


# -- questions -----------------------------------------------------------------------------------
def _ask(work: Transition, asked: Requested) -> None:
    state = work.state
    speaking = state.speaking
    if not state.process.is_there or state.process.phase is ProcessPhase.STOPPING:
        # The answer could not reach the process. And if the log has failed, a question of this
        # process would have no valid name.
        return
    if speaking is not None and speaking.phase is TurnPhase.INTERRUPTING:
        work.speak(work.speaker, lambda protocol: protocol.cancel(asked))
        return
    if any(question.asked.request == asked.request for question in state.questions):
        return  # A repetition of a question that is still open.
    if len(state.questions) >= QUESTIONS_MAX:
        _refuse(work, asked, "too many questions are open")
        return
    id = _name(work)
    work.set(questions=(*state.questions, AgentRequest(id, work.speaker, asked)))
    if asked.wants is RequestPurpose.WORKSPACE:
        # The question is about the permission. A caller that answers need not know which side does
        # the work.
        asked = replace(asked, wants=RequestPurpose.PERMISSION)
    work.log(
        work.speaker,
        kinds.QUESTION_ASKED,
        question=id,
        request=asked.request,
        wants=asked.wants,
        tool=asked.tool,
        input=asked.input,
        details=asked.details,
    )
    verdict = _verdict(work, asked, speaking) if asked.wants is RequestPurpose.PERMISSION else None
    # The kept answer is used up in any case. But a current rule takes precedence over an earlier
    # answer.
    kept = decision_for(work, asked)
    if verdict in (Verdict.ALLOW, Verdict.DENY):
        message = None if verdict is Verdict.ALLOW else "denied by a rule"
        answer(work, id, Decision(allows=verdict is Verdict.ALLOW, message=message, by="rule"))
        return
    if kept is not None:
        answer(work, id, kept)
        return
    work.do(AskHuman(id, asked, work.speaker))
    if state.config.question_seconds is not None:
        work.start_timer(state.config.question_seconds, Timer.QUESTION, id)
    work.attend_clocks()


def _name(work: Transition) -> str:
    """Return the name of the next question to be logged; see the module docstring."""
    return f"q-{work.state.process.epoch}.{work.state.head + len(work.entries) + 1}"


def _verdict(work: Transition, asked: Requested, speaking: Turn | None) -> Verdict | None:
    asks = () if speaking is None or speaking.ask is None else (speaking.ask.rules,)
    return permissions.verdict(asked.tool, (*asks, work.state.config.rules))


def answer(work: Transition, id: str, decision: Decision) -> AgentRequest | None:
    """Give a question its answer.

    Return None if the question has an answer already, is over, or has no process to hear the
    answer.
    """
    if answer_kept(work, id, decision):
        return None
    question = next((question for question in work.state.questions if question.id == id), None)
    if question is not None:
        asked = question.asked
        if asked.wants is not RequestPurpose.WORKSPACE:
            work.speak(question.turn, lambda protocol: protocol.answer(asked, decision))
        elif decision.allows:
            _call_back(work, asked)
        else:
            _refuse(work, asked, decision.message or "denied")
        forget(
            work,
            id,
            decision.word,
            by=decision.by,
            message=decision.message,
            option=decision.option,
            caller=decision.caller,
        )
    return question


def expire(work: Transition, id: str) -> None:
    """Answer a question that got no answer in time."""
    seconds = work.state.config.question_seconds
    if seconds is None:
        return  # The session was reopened without a limit, so questions wait forever now.
    message = f"no answer within {seconds:g} s"
    question = next((question for question in work.state.questions if question.id == id), None)
    # A default can stand in for a decision, but not for a user's input.
    is_permission = question is not None and question.asked.wants is RequestPurpose.PERMISSION
    allows = work.state.config.question_default == "allow" and is_permission
    answer(work, id, Decision(allows=allows, message=message, by="expiry"))


def close(work: Transition, *turns: str | None) -> None:
    """Cancel the questions of these turns, and notify the agent if it still reads."""
    for question in work.state.questions:
        if question.turn in turns:
            asked = question.asked
            work.speak(question.turn, lambda protocol, asked=asked: protocol.cancel(asked))
            forget(work, question.id, "cancelled", by="turn")


def leave(work: Transition, turn: str) -> None:
    """Detach the open questions from a turn that ended normally.

    The turn did not wait for them. They belong to a background task, which continues and still
    wants the answer.
    """
    if any(question.turn == turn for question in work.state.questions):
        left = (replace(q, turn=None) if q.turn == turn else q for q in work.state.questions)
        work.set(questions=tuple(left))


def lose_all(work: Transition) -> None:
    """Withdraw all questions after the log failed.

    The process that asked is being stopped. An answer could neither reach it nor be logged.
    """
    for question in work.state.questions:
        forget(work, question.id, "withdrawn", by="store")


def forget(
    work: Transition,
    id: str,
    answer: str,
    *,
    by: str,
    message: str | None = None,
    option: str | None = None,
    caller: str | None = None,
) -> None:
    """Remove a question, and log and report its answer. `caller`: the caller that gave it."""
    question = next(question for question in work.state.questions if question.id == id)
    work.set(questions=tuple(other for other in work.state.questions if other is not question))
    more = {} if option is None else {"option": option}
    work.log(
        question.turn,
        kinds.QUESTION_ANSWERED,
        question=id,
        answer=answer,
        by=by,
        message=message,
        **more,
        **kinds.named(caller),
    )
    work.cancel_timer(Timer.QUESTION, id)
    work.do(CloseQuestion(id))
    work.after_commit(TellAnswer(id, answer, by, message, caller=caller))
    work.attend_clocks()


# -- callbacks -----------------------------------------------------------------------------------
def _call_back(work: Transition, asked: Requested) -> None:
    state = work.state
    if any(other.request == asked.request for other in state.callbacks):
        return
    speaking = state.speaking
    if (
        asked.wants is RequestPurpose.WORKSPACE
        and speaking is not None
        and speaking.phase is TurnPhase.INTERRUPTING
    ):
        # The work would outlive the turn, or write after it was stopped.
        work.speak(work.speaker, lambda protocol: protocol.cancel(asked))
        return
    if len(state.callbacks) >= CALLBACKS_MAX:
        _refuse(work, asked, "too many callbacks are running")
        return
    work.set(callbacks=(*state.callbacks, asked))
    work.do(CallBack(state.process.number, asked))


def on_called(work: Transition, fact: CallbackAnswered) -> None:
    """Send the result of a callback to the agent."""
    asked = next((other for other in work.state.callbacks if other.request == fact.request), None)
    if asked is None or fact.process != work.state.process.number:
        # The agent has withdrawn the request or is gone. The next process may use the same request
        # id.
        return
    work.set(callbacks=tuple(other for other in work.state.callbacks if other is not asked))
    if fact.response is None:
        _refuse(work, asked, fact.error)
    else:
        response = fact.response
        work.speak(work.speaker, lambda protocol: protocol.respond(asked, response))


def _forget_callback(work: Transition, request: str) -> None:
    rest = tuple(other for other in work.state.callbacks if other.request != request)
    if len(rest) < len(work.state.callbacks):
        work.set(callbacks=rest)
        work.do(CloseCallback(request))


def forget_all(work: Transition) -> None:
    """Withdraw all requests of a process that is gone."""
    for question in work.state.questions:
        forget(work, question.id, "withdrawn", by="exit")
    for asked in work.state.callbacks:
        _forget_callback(work, asked.request)


# -- both ----------------------------------------------------------------------------------------
def _refuse(work: Transition, asked: Requested, error: str) -> None:
    work.speak(work.speaker, lambda protocol: protocol.refuse(asked, error))


# Kept questions: questions that outlive their process, if that is the session's policy.
#
# The process that waited for the answer is gone, so the answer has no addressee. But a human may
# still look at the question, and the resumed agent is likely to ask the same again. So a kept
# question stays visible and can be answered. The answer is for the next request with the same
# purpose, tool and input. That request gets it immediately and uses it up, unless a rule decides
# otherwise by then. If the agent asks before the kept question is answered, the new request is an
# ordinary question under a new name. The kept question is then over. A kept question keeps its
# name. Only the host that took an answer remembers it.


def kept(past: SessionHistory) -> tuple[KeptQuestion, ...]:
    """Return the kept questions of a session that is taken over."""
    return tuple(
        KeptQuestion(question.id, requested(question))
        for question in past.questions
        if question.is_kept
    )


def is_about_a_tool(question: OpenQuestion) -> bool:
    """Whether the question is about a tool.

    Only then can a later request be recognised as the same one: inputs are asked for in free text.
    """
    return question.wants == RequestPurpose.PERMISSION


def is_about_budget(question: OpenQuestion) -> bool:
    """Whether Banksman has asked about the budget: no process waits for the answer."""
    return question.wants == RequestPurpose.BUDGET


def requested(question: OpenQuestion) -> Requested:
    """Rebuild the agent's request from a logged question."""
    about: dict[str, Any] = msgspec.json.decode(question.about)
    return Requested(
        # Old logs name a question by the agent's request id.
        request=about.get("request", question.id),
        wants=RequestPurpose(about["wants"]),
        tool=about["tool"],
        input=about["input"],
        details=about["details"],
    )


def show(work: Transition) -> None:
    """Show the kept questions again, under the session's new owner."""
    for question in work.state.kept:
        work.do(AskHuman(question.id, question.asked, None))


def answer_kept(work: Transition, id: str, decision: Decision) -> bool:
    """Answer a kept question. Return whether it was one."""
    found = next((question for question in work.state.kept if question.id == id), None)
    if found is None or found.decision is not None:
        return found is not None
    if work.state.store is not Store.WORKING:
        # No process waits for this answer yet, so it can be given again once the log works.
        work.do(
            TellAnswer(id, decision.word, decision.by, decision.message, work.state.store_error)
        )
        return True
    _replace(work, found, [replace(found, decision=decision)])
    _end(work, found, decision.word, decision.by, decision.message, caller=decision.caller)
    return True


def _end(
    work: Transition,
    question: KeptQuestion,
    answer: str,
    by: str,
    message: str | None = None,
    *,
    caller: str | None = None,
) -> None:
    told = {"question": question.id, "answer": answer, "by": by, "message": message}
    work.log(None, kinds.QUESTION_ANSWERED, **told, **kinds.named(caller))
    work.do(CloseQuestion(question.id))
    work.after_commit(TellAnswer(question.id, answer, by, message, caller=caller))


def reopen(work: Transition, id: str) -> None:
    """Reopen a kept question whose answer the log has lost. The caller was notified of the loss."""
    found = next((question for question in work.state.kept if question.id == id), None)
    if found is not None:
        _replace(work, found, [replace(found, decision=None)])
        work.do(AskHuman(found.id, found.asked, None))


def decision_for(work: Transition, asked: Requested) -> Decision | None:
    """Use up the kept answer to the same request, if there is one."""
    found = next(
        (question for question in work.state.kept if _is_same(question.asked, asked)), None
    )
    if found is None:
        return None
    _replace(work, found, [])
    if found.decision is None:
        _end(work, found, "withdrawn", "asked again")
        return None
    return replace(found.decision, by="kept")


def _is_same(kept: Requested, asked: Requested) -> bool:
    return (kept.wants, kept.tool, kept.input) == (asked.wants, asked.tool, asked.input)


def _replace(work: Transition, found: KeptQuestion, by: Iterable[KeptQuestion]) -> None:
    work.set(kept=(*(question for question in work.state.kept if question is not found), *by))
