"""Screen of `banksman attach`: show a session live, send typed asks, answer questions by key."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

from banksman.cli import INTERRUPTED, OK
from banksman.cli.client.client import Client, segment
from banksman.cli.server_command import interrupt_turn, receipt_in_words
from banksman.cli.tui import question_view
from banksman.cli.tui.event_loop import (
    CallDone,
    Connected,
    EventReceived,
    FeedEnded,
    ScreenLoop,
    Signalled,
    Thing,
    Typed,
    follow,
    suspend,
)
from banksman.cli.tui.event_view import Event, EventPrinter
from banksman.cli.tui.keyboard import Keyboard, KeyPress, LineEditor
from banksman.cli.tui.screen import TICK_SECONDS, LiveScreen, TextStyle
from banksman.errors import BanksmanError

# The keys of a new question are shown and accepted only after this time: a key that the user was
# typing when the question came is no answer.
GUARD_SECONDS = 0.4
_ASK, _ANSWER, _INTERRUPT, _QUESTIONS = "ask", "answer", "interrupt", "questions"


class AttachScreen:
    """Live screen of one session. Runs in the thread of the loop, which is the main thread."""

    def __init__(
        self,
        loop: ScreenLoop,
        client: Client,
        session: dict[str, Any],
        keyboard: Keyboard,
        *,
        priority: str,
    ) -> None:
        self._loop = loop
        self._client = client
        self._path = f"/v1/sessions/{segment(session['id'])}"
        self._session = session
        self._keyboard = keyboard
        self._priority: str | int = int(priority) if priority.lstrip("-").isdigit() else priority
        self._editor = LineEditor()
        self._screen = LiveScreen(self._editor)
        self._teller = EventPrinter(self._screen, session["agent"], is_whole_session=True)
        self._running: str | None = session["holder"]
        # The turn that this user has interrupted. A second interrupt of the same turn means: leave.
        self._stopping: str | None = None
        self._questions: list[question_view.QuestionView] = []
        self._asked_at = 0.0
        # Questions that are answered. A listing of the open questions may be older than the answer.
        self._settled: set[str] = set()
        self._lines_sent: dict[str, str] = {}
        self._code: int | None = None
        self._stop_following: Callable[[], None] = lambda: None

    def run(self, after: str, *, is_alone: bool) -> int:
        """Show the session until the user leaves. Return the exit code.

        `is_alone`: the host is embedded in this process.
        """
        loop, session = self._loop, self._session
        loop.catch(signal.SIGINT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP)
        try:
            self._enter()
            self._screen.line(
                f"{session['name'] or session['id']}, {session['agent']}, {session['state']}",
                TextStyle.BOLD,
            )
            self._stop_following = follow(
                loop, self._client, session["id"], after=after, is_partial=True
            )
            loop.send(_QUESTIONS, lambda: self._client.get(f"{self._path}/questions"))
            while self._code is None:
                for thing in loop.things(
                    TICK_SECONDS if self._screen.moves or self._questions else None
                ):
                    self._take(thing)
                self._ask_first()
                self._screen.tick()
            if self._running is not None:
                goes_on = (
                    "the running turn finishes first; Ctrl-C stops it"
                    if is_alone
                    else "the session continues"
                )
                self._screen.line(f"left; {goes_on}")
            return self._code
        finally:
            # `top` continues after this screen, so the thread that follows the session must end.
            self._stop_following()
            self._leave()

    def _enter(self) -> None:
        self._loop.listen(self._keyboard)
        self._screen.enter()

    def _leave(self) -> None:
        self._loop.stop_listening()
        self._screen.leave()

    # -- input from the loop ----------------------------------------------------------------------
    def _take(self, thing: Thing) -> None:
        match thing:
            case EventReceived(event):
                self._event(event)
            case Typed(key):
                self._key(key)
            case Signalled(number):
                self._signal(number)
            case Connected(is_there):
                self._screen.line(
                    "connected again" if is_there else "connection lost, trying again",
                    TextStyle.ASKS,
                )
            case CallDone(errand, result, error):
                self._done(errand, result, error)
            case FeedEnded(error):
                raise error
            case _:
                pass

    def _event(self, event: Event) -> None:
        if event["kind"] == "stream.gap":
            self._screen.line(
                f"events {event['first']} to {event['last']} are no longer kept", TextStyle.BAD
            )
            return
        self._teller.tell(event)
        body, turn = event["body"], event["turn"]
        match event["kind"]:
            case "turn.started" if not body.get("into"):
                self._running = turn
            case "turn.ended" | "turn.requeued" if turn == self._running:
                self._running = None
            case "question.asked":
                self._add(question_view.question_of(body, turn))
            case "question.answered":
                self._answered(body)
            case _:
                pass

    def _done(self, errand: str, result: Any, error: BanksmanError | None) -> None:
        kind, _, key = errand.partition(" ")
        if kind == _ASK:
            line = self._lines_sent.pop(key)
            if error is not None:
                self._screen.line(f"cannot ask: {error}", TextStyle.BAD)
                self._editor.put_back(line)
        elif kind == _INTERRUPT:
            told = receipt_in_words(result) if error is None else f"cannot stop the turn: {error}"
            self._screen.line(told, TextStyle.ASKS if error is None else TextStyle.BAD)
        elif kind == _QUESTIONS and error is None:
            for asked in result["questions"]:
                self._add(question_view.question_of(asked, asked["turn"]))
        elif kind == _ANSWER and error is not None:
            self._screen.line(f"cannot answer the question: {error}", TextStyle.BAD)

    # -- keys and signals -------------------------------------------------------------------------
    def _key(self, key: str) -> None:
        if self._editor.text == "":
            if isinstance(key, KeyPress) and key == "end-of-input":
                self._code = OK
                return
            if self._takes_answers:
                choice = self._questions[0].chosen(key)
                if choice is not None:
                    self._choose(self._questions[0], choice)
                    return
        if isinstance(key, KeyPress) and key == "redraw":
            self._screen.redraw()
        line = self._editor.take(key)
        if line is not None and line.strip():
            self._ask(line)

    def _ask(self, line: str) -> None:
        body = {"prompt": line, "priority": self._priority}
        # The key makes the ask idempotent: after a lost reply the retry starts no second turn.
        key = uuid.uuid4().hex
        self._lines_sent[key] = line
        self._loop.send(
            f"{_ASK} {key}", lambda: self._client.post(f"{self._path}/turns", body, key=key)
        )

    def _signal(self, number: int) -> None:
        match number:
            case signal.SIGINT:
                self._interrupt()
            case signal.SIGTSTP:
                self._suspend()
            case signal.SIGWINCH:
                self._screen.redraw()
            case _:
                raise SystemExit(128 + number)

    def _interrupt(self) -> None:
        turn = self._running
        if turn is not None and turn != self._stopping:
            self._stopping = turn
            self._screen.line("stopping the turn; Ctrl-C again leaves", TextStyle.ASKS)
            self._loop.send(
                _INTERRUPT, lambda: interrupt_turn(self._client, self._session["id"], turn)
            )
        elif turn is None and self._editor.text:
            self._editor.clear()
        else:
            self._code = INTERRUPTED

    def _suspend(self) -> None:
        self._leave()
        suspend()
        self._enter()
        self._screen.redraw()

    # -- questions --------------------------------------------------------------------------------
    @property
    def _takes_answers(self) -> bool:
        return bool(self._questions) and time.monotonic() >= self._asked_at + GUARD_SECONDS

    def _add(self, question: question_view.QuestionView) -> None:
        if question.id not in self._settled and all(
            question.id != each.id for each in self._questions
        ):
            self._questions.append(question)
            if len(self._questions) == 1:
                self._asked_at = time.monotonic()

    def _ask_first(self) -> None:
        """Show the first question. Its keys are shown only while they are accepted."""
        if not self._questions:
            self._screen.ask(None)
            return
        question = self._questions[0]
        line = question.line()
        if not self._takes_answers:
            line = question.title
        elif self._editor.text:
            line = f"{question.title} (clear the line to answer with a key)"
        self._screen.ask(question, line)

    def _choose(
        self, question: question_view.QuestionView, choice: question_view.KeyChoice
    ) -> None:
        body = choice.body
        if body is None:
            self._interrupt()
            return
        path = f"{self._path}/questions/{segment(question.id)}"
        self._loop.send(_ANSWER, lambda: self._client.post(path, body))

    def _answered(self, body: dict[str, Any]) -> None:
        self._settled.add(body["question"])
        answered = next((each for each in self._questions if each.id == body["question"]), None)
        if answered is None:
            return
        self._questions.remove(answered)
        self._asked_at = time.monotonic()
        self._screen.end_text()
        self._screen.ask(None)
        self._screen.line(f"{answered.title} {body['answer']}, by {body['by']}")
