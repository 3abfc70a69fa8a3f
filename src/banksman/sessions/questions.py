"""Questions of the agent for callers: list, pass to a callback, check and give the answers.

The state machine (`core/session/questions.py`) decides whether a question is open, and applies
rules and timeouts. `answer` checks the state and dispatches its fact without suspending in between.
So of two concurrent answers, or of an answer and an expiry, one is the first. The other call
returns that first answer. Recent answers are kept here. Older answers are in the log: see
`find_answer`.
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

from banksman.core.dialects.dialect import PLAIN, Decision
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import event as kinds
from banksman.core.session import questions
from banksman.core.session.effects import AskHuman, TellAnswer
from banksman.core.session.event import Event, storable
from banksman.core.session.facts import QuestionAnswered
from banksman.core.session.history import OpenQuestion
from banksman.core.session.state import OVER, AgentRequest, KeptQuestion, Mode, Store, not_open
from banksman.errors import BanksmanError, Closed, NotFound, UsageError
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import RequestTasks, error_text

log = logging.getLogger("banksman")
# A separate logger, so that a host whose questions are answered by other means can silence it.
waiting = logging.getLogger("banksman.questions")

# Places where an agent can remember an answer. True means the first one.
PLACES = ("session", "local", "project", "user")

# Number of answers kept in memory for repeated calls. Older answers are read from the log.
ANSWERS_MAX = 256
# A question's id contains the seq of the event where it was asked.
_NAME = re.compile(r"q-[0-9]{1,18}\.([1-9][0-9]{0,17})")
# Search limit for a question whose id does not contain a seq. Such ids are older than the rule
# above, and a caller can invent one. The search must not read a whole history for it.
UNNAMED_EVENTS_MAX = 10_000
# Time that the end of a session waits for a cancelled callback that does not end.
CALLBACK_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """Question of the agent.

    `wants`: "permission" asks whether the agent may use this tool with this input. "elicitation"
    asks for the input that `details` describes. "budget" asks what to do about a budget that is
    used up: answer with one of the options in `details`. `details`: the agent's title, description,
    reason and suggestions. `id`: unique in the session and never reused.
    """

    id: str
    turn: str | None
    tool: str
    input: Mapping[str, Any]
    wants: str = "permission"
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a callback with more than a decision. See `Session.answer`."""

    decision: str
    message: str | None = None
    updated_input: Mapping[str, Any] | None = None
    content: Mapping[str, Any] | None = None
    remember: bool | str = False
    interrupt: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The one answer of a question.

    `answer`: "allow" or "deny", or an end without a decision: "cancelled" (its turn was stopped) or
    "withdrawn". `is_first`: this call gave the answer. `by`: the origin of the answer:

    - "answer" (of a caller), "callback" or its "failure", "rule", "expiry";
    - "kept": it was given to the same question before a crash;
    - the reason why the question ended: "agent", "turn", "exit" (of the process), "recovery",
      "store", "asked again", "budget" (it has changed).

    `caller`: the name of the caller that gave it; None: it has no name.
    """

    question: str
    answer: str
    by: str
    message: str | None
    is_first: bool
    caller: str | None = None


OnQuestion = Callable[[Question], "str | Answer | Awaitable[str | Answer]"]


class OpenQuestions:
    """Open questions of one session.

    Owns the tasks of the callbacks. A task ends with its question.
    """

    def __init__(self, driver: Driver, on_question: OnQuestion | None) -> None:
        self._driver = driver
        self.on_question = on_question
        self._open: dict[str, Question] = {}
        # Callers that wait for a durable answer, or for the error that prevents it.
        self._waiting: dict[str, asyncio.Future[Answered | BanksmanError]] = {}
        self._answers: OrderedDict[str, Answered] = OrderedDict()
        self._tasks = RequestTasks("on_question")

    def open(self) -> list[Question]:
        return list(self._open.values())

    def ask(self, effect: AskHuman) -> None:
        asked = effect.asked
        # A copy, so that a callback cannot change the input that it allows.
        given, details = storable([asked.input, asked.details])
        question = Question(
            effect.question,
            effect.turn,
            asked.tool,
            given,
            wants=asked.wants.value,
            details=details,
        )
        self._open[question.id] = question
        if self.on_question is None:
            # A caller may still list and answer the question. If no caller does, the turn is stuck,
            # and this line explains it.
            waiting.warning(
                "turn waits for an answer: no on_question callback (tool=%s)", asked.tool
            )
        else:
            # A separate task, so that the callback never runs inside `dispatch`.
            self._tasks.start(question.id, self._call(self.on_question, question))

    async def _call(self, on_question: OnQuestion, question: Question) -> None:
        try:
            answer = on_question(question)
            if inspect.isawaitable(answer):
                answer = await answer
            self._give(
                question.id, answer if isinstance(answer, Answer) else Answer(answer), by="callback"
            )
        except asyncio.CancelledError:
            # Either the question is over and `close` cancelled this task, and `_give` does nothing.
            # Or the callback cancelled itself, which is not an answer. Then the answer is a denial.
            self._give(question.id, Answer("deny", "the callback was cancelled"), by="failure")
            raise
        except BaseException as exc:
            # A tool must not run without permission. So a failed callback denies, and it affects no
            # other question.
            log.exception("on_question raised an exception, denying the request")
            self._give(
                question.id, Answer("deny", f"the callback failed: {error_text(exc)}"), by="failure"
            )
            if not isinstance(exc, Exception):
                raise

    def _give(self, id: str, answer: Answer, *, by: str) -> None:
        """Dispatch an answer, unless the question is over."""
        question = self._driver.state.open_question(id)
        if question is not None:
            self._driver.dispatch(self._decided(question, answer, by))

    def _decided(
        self,
        question: AgentRequest | KeptQuestion,
        answer: Answer,
        by: str,
        caller: str | None = None,
    ) -> QuestionAnswered:
        """Build the fact of an answer, and raise `UsageError` if the answer cannot be sent.

        `by`: recorded in the log: "answer" (of a caller), "callback" or "failure".
        """
        state = self._driver.state
        dialect = state.config.dialect
        decision = _decision(question.asked, answer, takes_input=dialect.takes_input)
        decision = replace(decision, by=by, caller=caller)
        try:
            storable([decision.message, decision.updated_input, decision.content])
        except (TypeError, ValueError, RecursionError) as exc:
            hint = "use text, numbers, lists and dicts"
            raise UsageError(f"cannot send the answer: {exc}", hint=hint) from exc
        # Encode the answer once and discard the result. An answer that the dialect cannot encode
        # must be refused here, because inside `dispatch` it would count as a bug. The encoder of
        # the running conversation is used if there is one. Requests that the workspace serves are
        # answered by their results, and questions about a budget by the session itself.
        if question.asked.wants not in (RequestPurpose.WORKSPACE, RequestPurpose.BUDGET):
            (state.process.protocol or dialect.begin(PLAIN)).answer(question.asked, decision)
        return QuestionAnswered(self._driver.now(), question.id, decision)

    # -- answers ----------------------------------------------------------------------------------
    async def answer(
        self,
        id: str,
        answer: Answer,
        tell: Callable[[QuestionAnswered], None],
        caller: str | None = None,
    ) -> Answered | None:
        """Answer an open question, and wait until the question's answer is durable.

        The result may be another caller's answer. None: the question is not open and its answer is
        not in memory. Cancelling the call only stops the wait.
        """
        state = self._driver.state
        question = None if state.mode in OVER else state.open_question(id)
        is_on_its_way = any(
            isinstance(told, TellAnswer) and told.question == id for _, told in state.deferred
        )
        if question is None and not is_on_its_way:
            return self._answers.get(id)
        if self._driver.error is not None:
            raise self._driver.bug()
        fact = None if question is None else self._decided(question, answer, "answer", caller)
        waiting = self._waiting.get(id)
        if waiting is None:
            waiting = self._waiting[id] = asyncio.get_running_loop().create_future()
        if fact is not None:
            tell(fact)
        told = await asyncio.shield(waiting)
        if isinstance(told, BanksmanError):
            # Each caller gets a copy of the error. A shared instance that is raised repeatedly
            # would keep the stack frames of all callers alive.
            raise copy(told)
        return dataclasses.replace(told, is_first=fact is not None)

    def tell(self, effect: TellAnswer) -> None:
        told = Answered(
            effect.question,
            effect.answer,
            effect.by,
            effect.message,
            is_first=False,
            caller=effect.caller,
        )
        if effect.error is None:
            self._answers[told.question] = told
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        waiting = self._waiting.pop(told.question, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(effect.error or told)

    def fail(self, error: BanksmanError) -> None:
        """Fail all waiting callers, because a bug ended the session."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(error)
        self._waiting.clear()

    def without_answer(self, id: str) -> Answered:
        """Return the answer of a question that is not open and has no answer in the log.

        Raises an error if the session's state explains why the answer is missing.
        """
        state = self._driver.state
        if state.mode is Mode.CLOSED:
            raise Closed(
                "the session is closed", hint="open it again and answer there", question=id
            )
        if state.mode is Mode.LEFT:
            raise not_open(state, question=id)
        if state.store is not Store.WORKING:
            assert state.store_error is not None
            raise copy(state.store_error)
        # The failed log lost the answer, and the process that asked was stopped with it.
        return Answered(id, "withdrawn", "store", None, is_first=False)

    def close(self, id: str) -> None:
        self._open.pop(id, None)
        self._tasks.cancel(id)

    def end(self) -> None:
        for id in list(self._open):
            self.close(id)
        # An answer that came while the session was handed over. The next host has the question.
        self.fail(not_open(self._driver.state))

    async def wait_ended(self) -> None:
        """Wait a limited time until the callbacks have ended.

        The callback that calls this function is not waited for.
        """
        running = self._tasks.running - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=CALLBACK_SECONDS_MAX)
            if late:
                message = "on_question callbacks still run after their cancellation (callbacks=%d)"
                log.warning(message, len(late))


async def find_answer(
    read: Callable[[int], AsyncGenerator[Event]], id: str, committed: int
) -> Answered | None:
    """Return the logged answer of a question that is over; None if the log has no answer.

    `NotFound`: the question was never asked, or retention removed it. `read`: reads the events
    after a seq. `committed`: the last committed seq.
    """
    told: Answered | None = None
    name = _NAME.fullmatch(id)
    is_known = False
    # A question from before the id rule has the agent's id. That id has no seq and may occur
    # several times.
    after = max(0, committed - UNNAMED_EVENTS_MAX) if name is None else int(name[1]) - 1
    async with aclosing(read(after)) as events:
        async for event in events:
            if event.kind == kinds.QUESTION_ASKED and event.body["question"] == id:
                is_known, told = True, None
            elif event.kind == kinds.QUESTION_ANSWERED and event.body["question"] == id:
                body = event.body
                by, message = body.get("by", "agent"), body.get("message")
                told = Answered(
                    id, body["answer"], by, message, is_first=False, caller=body.get("caller")
                )
            elif (
                name is not None
                and not is_known
                and event.kind != kinds.STREAM_GAP
                and event.seq <= int(name[1])
            ):
                break  # Another event is at the seq of the id, so this question was never asked.
            if told is not None and name is not None:
                break
    if not is_known and told is None:
        hint = "find the id with `banksman log SESSION`; old questions may be deleted"
        raise NotFound(f"there is no question {id!r:.100} in this session", hint=hint)
    return told


def as_logged(told: Answered, redactor: Redactor | None) -> Answered:
    """Redact the message of an answer.

    The message to the agent may hold a secret. Later callers get the redacted text of the log, so
    the first caller gets the same text.
    """
    if redactor is None or told.message is None:
        return told
    return dataclasses.replace(told, message=redactor.redact_text(told.message))


def checked(answer: Answer) -> Answer:
    """Return the answer, or raise `UsageError` if it cannot answer any question.

    The check ignores the state of the question. So a wrong answer always raises, and not only if it
    happens to be the first answer.
    """
    if not isinstance(cast(object, answer.decision), str) or not answer.decision:
        hint = 'use "allow", "deny", or the id of an option that the agent offers'
        raise UsageError(f"cannot answer a question with {answer.decision!r:.60}", hint=hint)
    # The meaning of an option depends on the question, so it is checked in `_decision`.
    allows, place = answer.decision != "deny", _place(answer)
    if place is not None and place not in PLACES:
        hint = f"use True, or one of: {', '.join(PLACES)}"
        raise UsageError(f"an answer cannot be remembered as {answer.remember!r:.60}", hint=hint)
    if not isinstance(cast(object, answer.message), str | None):
        message = f"the message of an answer cannot be {answer.message!r:.60}"
        raise UsageError(message, hint="use text")
    for name, given in (("updated_input", answer.updated_input), ("content", answer.content)):
        if not isinstance(cast(object, given), Mapping | None):
            message = f"the {name} of an answer cannot be {given!r:.60}"
            raise UsageError(message, hint="use a mapping")
    if answer.decision == "allow" and answer.interrupt:
        hint = 'use "deny" with interrupt=True'
        raise UsageError("an answer cannot both allow and interrupt", hint=hint)
    if not allows and (
        answer.remember or answer.updated_input is not None or answer.content is not None
    ):
        message = "an answer that denies cannot have remember, updated_input or content"
        raise UsageError(message, hint="leave them out, or allow")
    return answer


def _place(answer: Answer) -> str | None:
    return (
        ("session" if answer.remember else None)
        if isinstance(answer.remember, bool)
        else answer.remember
    )


def _decision(asked: Requested, answer: Answer, *, takes_input: bool) -> Decision:
    checked(answer)
    wants = asked.wants
    if (
        answer.updated_input is not None
        and not takes_input
        and wants is not RequestPurpose.ELICITATION
    ):
        # The agent would run the tool with the original input.
        hint = "allow the tool without updated_input, or deny with a message that says what to do"
        raise UsageError("this agent does not support updated_input", hint=hint)
    option = None if answer.decision in ("allow", "deny") else _option(asked, answer.decision)
    allows = answer.decision == "allow" if option is None else option["kind"].startswith("allow")
    if option is not None and (answer.remember or (allows and answer.interrupt)):
        hint = "leave them out, or choose another option"
        raise UsageError("an answer with an option cannot have remember or interrupt", hint=hint)
    if answer.content is not None and wants is not RequestPurpose.ELICITATION:
        hint = "use updated_input for the input of a tool"
        raise UsageError("only an answer to an elicitation can have content", hint=hint)
    if wants is RequestPurpose.ELICITATION and (
        answer.remember or answer.updated_input is not None
    ):
        message = "an answer to an elicitation cannot have remember or updated_input"
        raise UsageError(message, hint="use content")
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
    """Return the option with this id among the options that the agent offers."""
    offered = asked.details.get("options")
    known: dict[str, dict[str, str]] = {}
    for option in cast(list[Any], offered) if isinstance(offered, list) else []:
        members = cast(dict[str, Any], option) if isinstance(option, dict) else {}
        if all(isinstance(members.get(name), str) for name in ("optionId", "kind")):
            known[members["optionId"]] = members
    if id not in known:
        hint = ", ".join(("allow", "deny", *known))
        raise UsageError(f"cannot answer this question with {id!r:.60}", hint=f"use one of: {hint}")
    return known[id]


def asked_before(question: OpenQuestion) -> Question:
    """Build a question from its record in the log."""
    asked = questions.requested(question)
    return Question(
        question.id,
        question.turn,
        asked.tool,
        asked.input,
        wants=asked.wants.value,
        details=asked.details,
    )
