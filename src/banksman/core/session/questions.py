"""What the agent asks of us: each request has one answer, whoever gives it.

A question has a name of our own, which is the place of its `question.asked` in the log: the epoch under which its
process was started, and the seq. The agent's own request ids cannot be it: they are unique within one process at most,
and an answer that comes late, from a page that was left open, would answer what the next process asks under the same
one. Nor can the seq alone: what the log loses, when it fails or its host dies, is written again as something else,
after somebody has seen the name. But no epoch is given twice, and a process that the log has failed is asked nothing
more. So a name is good from the moment it is seen, in every process, host and epoch that comes after.

What the rules decide is answered at once. A question waits for somebody, for as long as it is configured to; a callback
of the caller's is called by the shell, and what it gives back comes in as a fact. The rest is refused: an agent that is
not answered waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session import event as kinds
from banksman.core.session import permissions
from banksman.core.session.effects import AskHuman, CallBack, CloseCallback, CloseQuestion, TellAnswer
from banksman.core.session.facts import CallbackAnswered, Timer
from banksman.core.session.history import OpenQuestion, SessionHistory
from banksman.core.session.permissions import Decision, Verdict
from banksman.core.session.state import AgentRequest, KeptQuestion, ProcessPhase, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase

# Questions that wait for somebody.
QUESTIONS_MAX = 64
# Callbacks that run at once.
CALLBACKS_MAX = 64


def on_request(work: Transition, asked: Requested) -> None:
    protocol = work.state.process.protocol
    if protocol is not None and protocol.recites:
        # It repeats what it had asked in another process: nobody is to answer that again.
        work.speak(None, lambda protocol: protocol.cancel(asked))
        return
    match asked.wants:
        case RequestPurpose.PERMISSION | RequestPurpose.ELICITATION:
            _ask(work, asked)
        case RequestPurpose.RULING:
            # Of a call too large to be read to its name nobody knows what the rules say.
            verdict = _verdict(work, asked, work.state.speaking) if asked.tool else Verdict.DENY
            work.speak(work.speaker, lambda protocol: protocol.rule(asked, verdict))
        case RequestPurpose.HOOK | RequestPurpose.TOOL:
            _call_back(work, asked)
        case RequestPurpose.WORKSPACE:
            _serve(work, asked)
        case RequestPurpose.UNKNOWN:
            _refuse(work, asked, f"Banksman does not answer {asked.subtype!r}")


def on_withdrawn(work: Transition, request: str) -> None:
    """The agent no longer wants that answer."""
    for question in work.state.questions:
        if question.asked.request == request:
            forget(work, question.id, "withdrawn", by="agent")
    _forget_callback(work, request)


def _serve(work: Transition, asked: Requested) -> None:
    """The agent has us do it, and so has not asked whether it may: what the rules say of such a tool is said here."""
    verdict = _verdict(work, asked, work.state.speaking) if asked.tool else None
    match verdict:
        case Verdict.DENY:
            _refuse(work, asked, f"a rule of this session says no to {asked.tool!r}")
        case Verdict.ASK:
            _ask(work, asked)
        case _:
            _call_back(work, asked)


# -- questions -------------------------------------------------------------------------------------------------------
def _ask(work: Transition, asked: Requested) -> None:
    state = work.state
    speaking = state.speaking
    if not state.process.is_there or state.process.phase is ProcessPhase.STOPPING:
        return  # It could not be told the answer. And one that was stopped since the log failed has no names any more.
    if speaking is not None and speaking.phase is TurnPhase.INTERRUPTING:
        work.speak(work.speaker, lambda protocol: protocol.cancel(asked))
        return
    if any(question.asked.request == asked.request for question in state.questions):
        return  # Asked again, and not answered yet.
    if len(state.questions) >= QUESTIONS_MAX:
        _refuse(work, asked, "too many questions are open")
        return
    id = _name(work)
    work.set(questions=(*state.questions, AgentRequest(id, work.speaker, asked)))
    if asked.wants is RequestPurpose.WORKSPACE:
        # Whether it may, is what is asked: whoever answers need not know who does it then.
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
    # Used up in any case; but what a rule says now comes before what somebody said then.
    kept = decision_for(work, asked)
    if verdict in (Verdict.ALLOW, Verdict.DENY):
        message = None if verdict is Verdict.ALLOW else "a rule says no"
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
    """Of the question that is logged next. See the module."""
    return f"q-{work.state.process.epoch}.{work.state.head + len(work.entries) + 1}"


def _verdict(work: Transition, asked: Requested, speaking: Turn | None) -> Verdict | None:
    asks = () if speaking is None or speaking.ask is None else (speaking.ask.rules,)
    return permissions.verdict(asked.tool, (*asks, work.state.config.rules))


def answer(work: Transition, id: str, decision: Decision) -> AgentRequest | None:
    """Give a question its answer; None: it has one already, or needs none any more, or nobody is there to hear it."""
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
        forget(work, id, decision.word, by=decision.by, message=decision.message, option=decision.option)
    return question


def expire(work: Transition, id: str) -> None:
    """Nobody has answered it in time."""
    seconds = work.state.config.question_seconds
    if seconds is None:
        return  # The session was opened again, and questions wait now.
    message = f"nobody answered within {seconds:g} s"
    question = next((question for question in work.state.questions if question.id == id), None)
    # Nobody can say for somebody else what they would have entered.
    is_permission = question is not None and question.asked.wants is RequestPurpose.PERMISSION
    allows = work.state.config.question_default == "allow" and is_permission
    answer(work, id, Decision(allows=allows, message=message, by="expiry"))


def close(work: Transition, *turns: str | None) -> None:
    """Those of these turns need no answer any more; the agent is told so, if it still hears us."""
    for question in work.state.questions:
        if question.turn in turns:
            asked = question.asked
            work.speak(question.turn, lambda protocol, asked=asked: protocol.cancel(asked))
            forget(work, question.id, "cancelled", by="turn")


def leave(work: Transition, turn: str) -> None:
    """A turn that came to its end by itself did not wait for these: they are of a task in its background, which goes
    on, and still wants to know."""
    if any(question.turn == turn for question in work.state.questions):
        left = (replace(q, turn=None) if q.turn == turn else q for q in work.state.questions)
        work.set(questions=tuple(left))


def lose_all(work: Transition) -> None:
    """The log has failed, and the process that asked is on its way out: no answer could reach it, nor be written."""
    for question in work.state.questions:
        forget(work, question.id, "withdrawn", by="store")


def forget(
    work: Transition, id: str, answer: str, *, by: str, message: str | None = None, option: str | None = None
) -> None:
    question = next(question for question in work.state.questions if question.id == id)
    work.set(questions=tuple(other for other in work.state.questions if other is not question))
    more = {} if option is None else {"option": option}
    work.log(question.turn, kinds.QUESTION_ANSWERED, question=id, answer=answer, by=by, message=message, **more)
    work.cancel_timer(Timer.QUESTION, id)
    work.do(CloseQuestion(id))
    work.after_commit(TellAnswer(id, answer, by, message))
    work.attend_clocks()


# -- callbacks -------------------------------------------------------------------------------------------------------
def _call_back(work: Transition, asked: Requested) -> None:
    state = work.state
    if any(other.request == asked.request for other in state.callbacks):
        return
    speaking = state.speaking
    if asked.wants is RequestPurpose.WORKSPACE and speaking is not None and speaking.phase is TurnPhase.INTERRUPTING:
        # What it would begin now would outlive the turn, and what it would write was told to stop.
        work.speak(work.speaker, lambda protocol: protocol.cancel(asked))
        return
    if len(state.callbacks) >= CALLBACKS_MAX:
        _refuse(work, asked, "too many callbacks are running")
        return
    work.set(callbacks=(*state.callbacks, asked))
    work.do(CallBack(state.process.number, asked))


def on_called(work: Transition, fact: CallbackAnswered) -> None:
    asked = next((other for other in work.state.callbacks if other.request == fact.request), None)
    if asked is None or fact.process != work.state.process.number:
        return  # The agent has withdrawn it, or is gone; the next one may use its names again.
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
    """The process that asked is gone."""
    for question in work.state.questions:
        forget(work, question.id, "withdrawn", by="exit")
    for asked in work.state.callbacks:
        _forget_callback(work, asked.request)


# -- both ------------------------------------------------------------------------------------------------------------
def _refuse(work: Transition, asked: Requested, error: str) -> None:
    work.speak(work.speaker, lambda protocol: protocol.refuse(asked, error))


# Questions that outlive the process that asked them: kept through a crash, if that is the session's policy.
#
# The process that waited for the answer is gone, so an answer has nowhere to go. But the one who was to give it may
# still be looking at the question, and the agent, resumed, is likely to ask the same again. So a kept question is shown
# and can be answered, and the answer is for the next request that wants the same, of the same tool, with the same
# input: it is given at once, and used up, unless a rule says otherwise by then. If the agent asks before anybody has
# answered, it is a question like any other, under a name of its own, and the kept one is over. A kept question keeps
# its name. An answer is remembered by the host that took it, and no longer.


def kept(past: SessionHistory) -> tuple[KeptQuestion, ...]:
    """Those of a session that is taken over."""
    return tuple(KeptQuestion(question.id, requested(question)) for question in past.questions if question.is_kept)


def is_about_a_tool(question: OpenQuestion) -> bool:
    """Only of those can be told whether another is the same: what a user is to enter is asked in words."""
    return bool(msgspec.json.decode(question.about)["wants"] == RequestPurpose.PERMISSION)


def requested(question: OpenQuestion) -> Requested:
    about: dict[str, Any] = msgspec.json.decode(question.about)
    return Requested(
        # Before we had names of our own for questions, theirs was the agent's.
        request=about.get("request", question.id),
        wants=RequestPurpose(about["wants"]),
        tool=about["tool"],
        input=about["input"],
        details=about["details"],
    )


def show(work: Transition) -> None:
    """To whoever answers questions now."""
    for question in work.state.kept:
        work.do(AskHuman(question.id, question.asked, None))


def answer_kept(work: Transition, id: str, decision: Decision) -> bool:
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


def _end(work: Transition, question: KeptQuestion, answer: str, by: str, message: str | None = None) -> None:
    work.log(None, kinds.QUESTION_ANSWERED, question=question.id, answer=answer, by=by, message=message)
    work.do(CloseQuestion(question.id))
    work.after_commit(TellAnswer(question.id, answer, by, message))


def reopen(work: Transition, id: str) -> None:
    """The log has lost its answer, and whoever gave it was told so: it waits again."""
    found = next((question for question in work.state.kept if question.id == id), None)
    if found is not None:
        _replace(work, found, [replace(found, decision=None)])
        work.do(AskHuman(found.id, found.asked, None))


def decision_for(work: Transition, asked: Requested) -> Decision | None:
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


def _replace(work: Transition, found: KeptQuestion, by: Iterable[KeptQuestion]) -> None:
    work.set(kept=(*(question for question in work.state.kept if question is not found), *by))
