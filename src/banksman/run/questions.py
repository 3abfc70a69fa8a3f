"""Questions of the agent: shown to whoever looks, given to a callback if there is one, answered once."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from banksman.core.session_facts import AskHuman, QuestionAnswered
from banksman.errors import UsageError
from banksman.run.driver import Driver

log = logging.getLogger("banksman")


@dataclass(frozen=True, slots=True)
class Question:
    """Something the agent asks: may it use this tool, with this input?"""

    id: str
    turn: str | None
    tool: str
    input: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a callback may return instead of a word: more than yes or no."""

    decision: str
    message: str | None = None
    updated_input: Mapping[str, Any] | None = None


# How long the end of a session waits for a callback that was cancelled and does not end.
CALLBACK_SECONDS_MAX = 5.0

OnQuestion = Callable[[Question], "str | Answer | Awaitable[str | Answer]"]


class Questions:
    """The open questions of one session. It owns the tasks of the callbacks: they end with their question."""

    def __init__(self, driver: Driver, on_question: OnQuestion | None) -> None:
        self._driver = driver
        self._on_question = on_question
        self._open: dict[str, Question] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Every one that is not over, those of closed questions too: they may have something to clean up.
        self._running: set[asyncio.Task[None]] = set()

    def open(self) -> list[Question]:
        return list(self._open.values())

    def ask(self, effect: AskHuman) -> None:
        question = Question(effect.question, effect.turn, effect.tool, effect.input)
        self._open[question.id] = question
        if self._on_question is None:
            # Somebody may look and answer, or nobody ever does: then the turn stands still, and this line says why.
            log.warning(
                "! the agent asks whether it may use %s, and there is no on_question; the turn waits", effect.tool
            )
        else:
            # A task, so that the callback never runs inside the door.
            task = asyncio.ensure_future(self._call(self._on_question, question))
            self._tasks[question.id] = task
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _call(self, on_question: OnQuestion, question: Question) -> None:
        try:
            answer = on_question(question)
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Answer):
                self.answer(question.id, answer.decision, message=answer.message, updated_input=answer.updated_input)
            else:
                self.answer(question.id, answer)
        except asyncio.CancelledError:
            # By us, because the question is over: then this says nothing. Or by itself, and that is no answer either.
            self.answer(question.id, "deny", message="the callback was cancelled")
            raise
        except Exception as exc:
            # Nothing runs before it was allowed: a callback that fails says no, and harms nobody else.
            log.exception("! on_question raised; the answer is no")
            reason = str(exc).encode(errors="replace").decode()
            self.answer(question.id, "deny", message=f"the callback failed: {reason}")

    def answer(
        self,
        id: str,
        decision: str,
        *,
        message: str | None = None,
        updated_input: Mapping[str, Any] | None = None,
    ) -> None:
        question = self._open.get(id)
        if question is None:
            return  # It was answered already, or needs no answer any more.
        if decision not in ("allow", "deny"):
            raise UsageError(f"a question cannot be answered with {decision!r}", hint='"allow" or "deny"')
        if decision == "allow":
            # An empty input is an input: what was emptied on purpose must not run as it was asked for.
            given = {
                "behavior": "allow",
                "updatedInput": dict(question.input if updated_input is None else updated_input),
            }
        else:
            given = {"behavior": "deny", "message": message or "denied"}
        # Encoded once to be refused here if it cannot be sent, and not in the door, where it would be a bug of ours.
        self._driver.state.config.dialect.answer(id, given)
        self._driver.tell(QuestionAnswered(self._driver.now(), id, given))

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
