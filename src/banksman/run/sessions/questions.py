"""Questions of the agent: shown to whoever looks, given to a callback if there is one, answered once."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from banksman.core.decision import Decision
from banksman.core.event import storable
from banksman.core.meaning import Wants
from banksman.core.session_facts import AskHuman, QuestionAnswered
from banksman.errors import UsageError
from banksman.run.sessions.driver import Driver
from banksman.run.sessions.hooks import reason

log = logging.getLogger("banksman")

# Where an agent can be told to remember an answer; True is the first.
PLACES = ("session", "local", "project", "user")


@dataclass(frozen=True, slots=True)
class Question:
    """Something the agent asks. `wants` "permission": may it use this tool, with this input? "elicitation": what is
    asked for in `details`. `details` are the agent's own words: a title, a description, a reason, suggestions."""

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


# How long the end of a session waits for a callback that was cancelled and does not end.
CALLBACK_SECONDS_MAX = 5.0

OnQuestion = Callable[[Question], "str | Answer | Awaitable[str | Answer]"]


class Questions:
    """The open questions of one session. It owns the tasks of the callbacks: they end with their question."""

    def __init__(self, driver: Driver, on_question: OnQuestion | None) -> None:
        self._driver = driver
        self.on_question = on_question
        self._open: dict[str, tuple[Question, AskHuman]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Every one that is not over, those of closed questions too: they may have something to clean up.
        self._running: set[asyncio.Task[None]] = set()

    def open(self) -> list[Question]:
        return [question for question, _ in self._open.values()]

    def ask(self, effect: AskHuman) -> None:
        asked = effect.asked
        # A copy: whatever is done to it, what is allowed is what was asked for.
        given, details = storable([asked.input, asked.details])
        question = Question(asked.request, effect.turn, asked.tool, given, wants=asked.wants.value, details=details)
        self._open[question.id] = question, effect
        if self.on_question is None:
            # Somebody may look and answer, or nobody ever does: then the turn stands still, and this line says why.
            log.warning("! the agent asks about %s, and there is no on_question; the turn waits", asked.tool)
        else:
            # A task, so that the callback never runs inside the door.
            task = asyncio.ensure_future(self._call(self.on_question, question))
            self._tasks[question.id] = task
            self._running.add(task)
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            # What is no error of the callback's (an exit, say) is told here: nobody waits for the task.
            log.error("! on_question ended by %s", type(exc).__name__)

    async def _call(self, on_question: OnQuestion, question: Question) -> None:
        try:
            answer = on_question(question)
            if inspect.isawaitable(answer):
                answer = await answer
            self.answer(question.id, answer if isinstance(answer, Answer) else Answer(answer), by="callback")
        except asyncio.CancelledError:
            # By us, because the question is over: then this says nothing. Or by itself, and that is no answer either.
            self.answer(question.id, Answer("deny", "the callback was cancelled"), by="failure")
            raise
        except BaseException as exc:
            # Nothing runs before it was allowed: a callback that fails says no, and harms nobody else.
            log.exception("! on_question raised; the answer is no")
            self.answer(question.id, Answer("deny", f"the callback failed: {reason(exc)}"), by="failure")
            if not isinstance(exc, Exception):
                raise

    def answer(self, id: str, answer: Answer, *, by: str = "answer") -> None:
        """`by`, for the log: somebody's "answer", a "callback", or the "failure" of one."""
        if id not in self._open:
            return  # It was answered already, or needs no answer any more.
        _, effect = self._open[id]
        decision = replace(_decision(effect.asked.wants, answer), by=by)
        # Encoded once to be refused here if it cannot be sent, and not in the door, where it would be a bug of ours.
        self._driver.state.config.dialect.answer(effect.asked, decision)
        self._driver.tell(QuestionAnswered(self._driver.now(), id, decision))

    def close(self, id: str) -> None:
        self._open.pop(id, None)
        task = self._tasks.pop(id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def end(self) -> None:
        for id in list(self._open):
            self.close(id)

    async def wait_ended(self) -> None:
        """Until no callback runs any more, but for the one that asks, and not for ever."""
        running = self._running - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=CALLBACK_SECONDS_MAX)
            if late:
                log.warning("! %d callbacks of on_question were cancelled and go on all the same", len(late))


def _decision(wants: Wants, answer: Answer) -> Decision:
    if answer.decision not in ("allow", "deny"):
        raise UsageError(f"a question cannot be answered with {answer.decision!r:.60}", hint='"allow" or "deny"')
    allows = answer.decision == "allow"
    place = ("session" if answer.remember else None) if isinstance(answer.remember, bool) else answer.remember
    if place is not None and place not in PLACES:
        hint = f"True, or one of {', '.join(PLACES)}"
        raise UsageError(f"an answer cannot be remembered as {answer.remember!r:.60}", hint=hint)
    if not isinstance(cast(object, answer.message), str | None):
        raise UsageError(f"the message of an answer cannot be {answer.message!r:.60}", hint="text")
    for name, given in (("updated_input", answer.updated_input), ("content", answer.content)):
        if not isinstance(cast(object, given), Mapping | None):
            raise UsageError(f"the {name} of an answer cannot be {given!r:.60}", hint="a mapping")
    if allows and answer.interrupt:
        raise UsageError("an answer cannot both allow and interrupt", hint='"deny" with interrupt=True')
    if answer.content is not None and wants is not Wants.ELICITATION:
        raise UsageError("content answers an elicitation, and this is none", hint="updated_input, perhaps")
    if wants is Wants.ELICITATION and (answer.remember or answer.updated_input is not None):
        raise UsageError("an elicitation has no tool to remember or to give an input to", hint="content")
    if not allows and (answer.remember or answer.updated_input is not None or answer.content is not None):
        raise UsageError("a denied question has nothing to remember and no input", hint="leave them out, or allow")
    return Decision(
        allows=allows,
        message=answer.message,
        updated_input=answer.updated_input,
        content=answer.content,
        remember=place,
        interrupts=answer.interrupt,
    )
