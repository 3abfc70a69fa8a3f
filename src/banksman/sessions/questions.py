"""Questions of the agent: shown to whoever looks, given to a callback if there is one, answered once.

Whether a question is open is for the door to say, and for nobody else: whoever answers looks there, and answers, in one
breath. So of two who answer at once, or of an answer and an expiry, one is the first, and the other hears what that
was. What a question's answer was is known here of the last ones, and of all others by the log: see `find_answer`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec.structs import replace

from banksman.core.dialects.dialect import PLAIN
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session import event as kinds
from banksman.core.session import questions
from banksman.core.session.effects import AskHuman, TellAnswer
from banksman.core.session.event import Event, storable
from banksman.core.session.facts import QuestionAnswered
from banksman.core.session.history import OpenQuestion
from banksman.core.session.permissions import Decision
from banksman.core.session.state import OVER, AgentRequest, KeptQuestion, Mode, Store, not_open
from banksman.errors import BanksmanError, Closed, NotFound, UsageError
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import RequestTasks, error_text

log = logging.getLogger("banksman")
# By itself, so that a host whose questions are answered from elsewhere can do without it.
waiting = logging.getLogger("banksman.questions")

# Where an agent can be told to remember an answer; True is the first.
PLACES = ("session", "local", "project", "user")

# How many answers are remembered for whoever answers again; all others are looked for in the log.
ANSWERS_MAX = 256
# The name of a question says where it was asked.
_NAME = re.compile(r"q-[0-9]{1,18}\.([1-9][0-9]{0,17})")
# How far back a question is looked for whose name does not say where it was asked. Such names are older than the rule
# above, and anybody can make one up: the search must not read a whole history for it.
UNNAMED_EVENTS_MAX = 10_000
# How long the end of a session waits for a callback that was cancelled and does not end.
CALLBACK_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """Something the agent asks. `wants` "permission": may it use this tool, with this input? "elicitation": what is
    asked for in `details`. `details` are the agent's own words: a title, a description, a reason, suggestions. `id` is
    the session's name for it, and never another's."""

    id: str
    turn: str | None
    tool: str
    input: Mapping[str, Any]
    wants: str = "permission"
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a callback may return instead of a word: more than yes or no. See `Session.answer`."""

    decision: str
    message: str | None = None
    updated_input: Mapping[str, Any] | None = None
    content: Mapping[str, Any] | None = None
    remember: bool | str = False
    interrupt: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The one answer that a question has. `answer`: "allow" or "deny"; or it needed none any more: "cancelled" (its
    turn was stopped) or "withdrawn". `by`: "answer" (of a caller's), "callback" or its "failure", "rule", "expiry",
    "kept" (it was given to the same question before a crash), or what ended the question: "agent", "turn", "exit" (of
    the process), "recovery", "store", "asked again". `is_first`: it was given by this call."""

    question: str
    answer: str
    by: str
    message: str | None
    is_first: bool


OnQuestion = Callable[[Question], "str | Answer | Awaitable[str | Answer]"]


class Questions:
    """The open questions of one session. It owns the tasks of the callbacks: they end with their question."""

    def __init__(self, driver: Driver, on_question: OnQuestion | None) -> None:
        self._driver = driver
        self.on_question = on_question
        self._open: dict[str, Question] = {}
        # Who waits until an answer is durable: for it, or for why it never will be.
        self._waiting: dict[str, asyncio.Future[Answered | BanksmanError]] = {}
        self._answers: OrderedDict[str, Answered] = OrderedDict()
        self._tasks = RequestTasks("on_question")

    def open(self) -> list[Question]:
        return list(self._open.values())

    def ask(self, effect: AskHuman) -> None:
        asked = effect.asked
        # A copy: whatever is done to it, what is allowed is what was asked for.
        given, details = storable([asked.input, asked.details])
        question = Question(effect.question, effect.turn, asked.tool, given, wants=asked.wants.value, details=details)
        self._open[question.id] = question
        if self.on_question is None:
            # Somebody may look and answer, or nobody ever does: then the turn stands still, and this line says why.
            waiting.warning("! the agent asks about %s, and there is no on_question; the turn waits", asked.tool)
        else:
            # A task, so that the callback never runs inside the door.
            self._tasks.start(question.id, self._call(self.on_question, question))

    async def _call(self, on_question: OnQuestion, question: Question) -> None:
        try:
            answer = on_question(question)
            if inspect.isawaitable(answer):
                answer = await answer
            self._give(question.id, answer if isinstance(answer, Answer) else Answer(answer), by="callback")
        except asyncio.CancelledError:
            # By us, because the question is over: then this says nothing. Or by itself, and that is no answer either.
            self._give(question.id, Answer("deny", "the callback was cancelled"), by="failure")
            raise
        except BaseException as exc:
            # Nothing runs before it was allowed: a callback that fails says no, and harms nobody else.
            log.exception("! on_question raised; the answer is no")
            self._give(question.id, Answer("deny", f"the callback failed: {error_text(exc)}"), by="failure")
            if not isinstance(exc, Exception):
                raise

    def _give(self, id: str, answer: Answer, *, by: str) -> None:
        """One that is over is let be."""
        question = self._driver.state.open_question(id)
        if question is not None:
            self._driver.dispatch(self._decided(question, answer, by))

    def _decided(self, question: AgentRequest | KeptQuestion, answer: Answer, by: str) -> QuestionAnswered:
        """`by`, for the log: somebody's "answer", a "callback", or the "failure" of one."""
        state = self._driver.state
        dialect = state.config.dialect
        decision = replace(_decision(question.asked, answer, takes_input=dialect.takes_input), by=by)
        try:
            storable([decision.message, decision.updated_input, decision.content])
        except (TypeError, ValueError, RecursionError) as exc:
            raise UsageError(f"this answer cannot be sent: {exc}", hint="text, numbers, lists and dicts") from exc
        # Said once to be refused here if it cannot be, and not in the door, where it would be a bug of ours: in the
        # conversation in which it was asked, where there is one. That is a value, and what comes of it is let go.
        # What we serve ourselves is answered by what comes of it.
        if question.asked.wants is not RequestPurpose.WORKSPACE:
            (state.process.protocol or dialect.begin(PLAIN)).answer(question.asked, decision)
        return QuestionAnswered(self._driver.now(), question.id, decision)

    # -- what its answer is ------------------------------------------------------------------------------------------
    async def answer(self, id: str, answer: Answer, tell: Callable[[QuestionAnswered], None]) -> Answered | None:
        """Give it, if the question is open, and wait until its answer is durable, whosever it is. None: it is not open,
        and not one of the last that were. Cancelling this only stops waiting."""
        state = self._driver.state
        question = None if state.mode in OVER else state.open_question(id)
        is_on_its_way = any(isinstance(told, TellAnswer) and told.question == id for _, told in state.deferred)
        if question is None and not is_on_its_way:
            return self._answers.get(id)
        if self._driver.error is not None:
            raise self._driver.bug()
        fact = None if question is None else self._decided(question, answer, "answer")
        waiting = self._waiting.get(id)
        if waiting is None:
            waiting = self._waiting[id] = asyncio.get_running_loop().create_future()
        if fact is not None:
            tell(fact)
        told = await asyncio.shield(waiting)
        if isinstance(told, BanksmanError):
            # Each gets its own: one that is raised again and again would keep the frames of all who got it.
            raise copy(told)
        return dataclasses.replace(told, is_first=fact is not None)

    def tell(self, effect: TellAnswer) -> None:
        told = Answered(effect.question, effect.answer, effect.by, effect.message, is_first=False)
        if effect.error is None:
            self._answers[told.question] = told
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        waiting = self._waiting.pop(told.question, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(effect.error or told)

    def fail(self, error: BanksmanError) -> None:
        """A bug of ours: nobody will ever say what the answer is."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(error)
        self._waiting.clear()

    def without_answer(self, id: str) -> Answered:
        """Of one that was asked, is not open, and has no answer in the log."""
        state = self._driver.state
        if state.mode is Mode.CLOSED:
            raise Closed("the session is closed", hint="open it again, and answer there", question=id)
        if state.mode is Mode.LEFT:
            raise not_open(state, question=id)
        if state.store is not Store.WORKING:
            assert state.store_error is not None
            raise copy(state.store_error)
        # Its answer was lost with a log that failed, and with it the process that asked.
        return Answered(id, "withdrawn", "store", None, is_first=False)

    def close(self, id: str) -> None:
        self._open.pop(id, None)
        self._tasks.cancel(id)

    def end(self) -> None:
        for id in list(self._open):
            self.close(id)

    async def wait_ended(self) -> None:
        """Until no callback runs any more, but for the one that asks, and not for ever."""
        running = self._tasks.running - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=CALLBACK_SECONDS_MAX)
            if late:
                log.warning("! %d callbacks of on_question were cancelled and go on all the same", len(late))


async def find_answer(read: Callable[[int], AsyncGenerator[Event]], id: str, committed: int) -> Answered | None:
    """What the log says was answered to one that is over; None: it was asked, and the log has no answer of it.
    `NotFound`: it was never asked, or is too old to be kept. `read`: the events after a seq; `committed`: the last."""
    told: Answered | None = None
    name = _NAME.fullmatch(id)
    is_known = False
    # One from before questions had names of ours has the agent's, says not where it was, and may have come again.
    after = max(0, committed - UNNAMED_EVENTS_MAX) if name is None else int(name[1]) - 1
    async with aclosing(read(after)) as events:
        async for event in events:
            if event.kind == kinds.QUESTION_ASKED and event.body["question"] == id:
                is_known, told = True, None
            elif event.kind == kinds.QUESTION_ANSWERED and event.body["question"] == id:
                body = event.body
                told = Answered(id, body["answer"], body.get("by", "agent"), body.get("message"), is_first=False)
            elif name is not None and not is_known and event.kind != kinds.STREAM_GAP and event.seq <= int(name[1]):
                break  # There is something else in its place.
            if told is not None and name is not None:
                break
    if not is_known and told is None:
        raise NotFound(f"there is no question {id!r:.100} in this session", hint="it may be too old to be kept")
    return told


def checked(answer: Answer) -> Answer:
    """`UsageError` for what could answer no question at all. It is one whatever has become of the question: who gives
    such an answer hears of it the first time, and not only when it happens to be the first."""
    if not isinstance(cast(object, answer.decision), str) or not answer.decision:
        hint = '"allow", "deny", or the id of an option that the agent offers'
        raise UsageError(f"a question cannot be answered with {answer.decision!r:.60}", hint=hint)
    # What an option means is known where the question is.
    allows, place = answer.decision != "deny", _place(answer)
    if place is not None and place not in PLACES:
        hint = f"True, or one of {', '.join(PLACES)}"
        raise UsageError(f"an answer cannot be remembered as {answer.remember!r:.60}", hint=hint)
    if not isinstance(cast(object, answer.message), str | None):
        raise UsageError(f"the message of an answer cannot be {answer.message!r:.60}", hint="text")
    for name, given in (("updated_input", answer.updated_input), ("content", answer.content)):
        if not isinstance(cast(object, given), Mapping | None):
            raise UsageError(f"the {name} of an answer cannot be {given!r:.60}", hint="a mapping")
    if answer.decision == "allow" and answer.interrupt:
        raise UsageError("an answer cannot both allow and interrupt", hint='"deny" with interrupt=True')
    if not allows and (answer.remember or answer.updated_input is not None or answer.content is not None):
        raise UsageError("a denied question has nothing to remember and no input", hint="leave them out, or allow")
    return answer


def _place(answer: Answer) -> str | None:
    return ("session" if answer.remember else None) if isinstance(answer.remember, bool) else answer.remember


def _decision(asked: Requested, answer: Answer, *, takes_input: bool) -> Decision:
    checked(answer)
    wants = asked.wants
    if answer.updated_input is not None and not takes_input and wants is not RequestPurpose.ELICITATION:
        # It would run with the input that it was asked about.
        hint = "allow it as it is, or deny with a message that says what to do instead"
        raise UsageError("this agent cannot be told to use a tool with another input", hint=hint)
    option = None if answer.decision in ("allow", "deny") else _option(asked, answer.decision)
    allows = answer.decision == "allow" if option is None else option["kind"].startswith("allow")
    if option is not None and (answer.remember or (allows and answer.interrupt)):
        raise UsageError("an option says by itself what is remembered", hint="leave the rest out, or choose another")
    if answer.content is not None and wants is not RequestPurpose.ELICITATION:
        raise UsageError("content answers an elicitation, and this is none", hint="updated_input, perhaps")
    if wants is RequestPurpose.ELICITATION and (answer.remember or answer.updated_input is not None):
        raise UsageError("an elicitation has no tool to remember or to give an input to", hint="content")
    return Decision(
        allows=allows,
        option=None if option is None else option["optionId"],
        message=answer.message,
        updated_input=answer.updated_input,
        content=answer.content,
        remember=_place(answer),
        interrupts=answer.interrupt,
    )


def _option(asked: Requested, id: str) -> dict[str, str]:
    """The one of this id, of those that the agent offers."""
    offered = asked.details.get("options")
    known: dict[str, dict[str, str]] = {}
    for option in cast(list[Any], offered) if isinstance(offered, list) else []:
        members = cast(dict[str, Any], option) if isinstance(option, dict) else {}
        if all(isinstance(members.get(name), str) for name in ("optionId", "kind")):
            known[members["optionId"]] = members
    if id not in known:
        hint = ", ".join(("allow", "deny", *known))
        raise UsageError(f"this question cannot be answered with {id!r:.60}", hint=f"one of: {hint}")
    return known[id]


def asked_before(question: OpenQuestion) -> Question:
    """One that the log of a session tells of."""
    asked = questions.requested(question)
    return Question(question.id, question.turn, asked.tool, asked.input, wants=asked.wants.value, details=asked.details)
