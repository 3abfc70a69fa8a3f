"""Show one turn until its end, with questions and Ctrl-C. `ask` and `run` share this.

A person answers the questions, or `on_question` does (allow, deny, fail). A time limit interrupts
the turn.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from banksman.cli.client.client import Client, segment
from banksman.cli.output import as_text, how_to_answer, say, say_json, stderr_style
from banksman.cli.server_command import interrupt_turn, receipt_in_words
from banksman.cli.tui import question_view
from banksman.cli.tui.event_loop import (
    CallDone,
    Connected,
    EventReceived,
    FeedEnded,
    ScreenLoop,
    Thing,
    Typed,
    follow,
)
from banksman.cli.tui.event_view import LIMIT_KINDS, Event, EventPrinter, outcome_in_words
from banksman.cli.tui.keyboard import Keyboard, open_keyboard
from banksman.cli.tui.screen import TICK_SECONDS, PlainScreen, TextStyle
from banksman.cli.tui.session_table import budget_in_words, limit_in_words
from banksman.errors import BanksmanError

# Count Ctrl-C. The first stops the turn and not the program: the turn's end follows in a moment.
# The second raises `KeyboardInterrupt` in the main thread, which ends the program.
#
# A separate thread stops the turn. A slow reader of stdout can block the main thread, and must not
# delay the stop.

# Names of the two `CallDone` that the thread posts: the stop was sent; the receipt came.
STOPPING, STOPPED = "stopping", "stopped"
# How long one request for the outcome may wait in the server. Then it is sent again.
WAIT_SECONDS = 30
# The receipt of a stop arrives about when the turn ends. After this time it will not come.
RECEIPT_SECONDS_MAX = 5.0
# The name of an answer's call ends with the id of the question.
_OUTCOME, _ANSWER = "outcome", "answer "


class Stops:
    """Handle Ctrl-C for one turn."""

    def __init__(self, loop: ScreenLoop, client: Client) -> None:
        self.count = 0
        # A stop was requested and its receipt has not arrived.
        self.is_due = False
        self._loop = loop
        self._client = client
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        loop.handle(signal.SIGINT, self._on_signal)

    def begin(self, session: str, turn: str) -> None:
        """Set the turn. A stop that was requested earlier is sent now."""
        threading.Thread(
            target=self._stop, args=(session, turn), name="banksman-interrupt", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop the turn as the first Ctrl-C does, without counting as one."""
        if not self.is_due:
            self.is_due = True
            self._wishes.put(True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self.stop()

    def _stop(self, session: str, turn: str) -> None:
        self._wishes.get()
        self._loop.post(CallDone(STOPPING))
        try:
            self._loop.post(CallDone(STOPPED, interrupt_turn(self._client, session, turn)))
        except BanksmanError as exc:
            self._loop.post(CallDone(STOPPED, error=exc))


# One turn, shown until its end.
#
# The agent's text goes to stdout, everything else to stderr. A question is asked here if there is a
# terminal. Otherwise the output says how to answer it from another terminal, and the turn waits.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of a turn's display.

    `form`: text, json or quiet. `on_question`: ask, allow, deny or fail. `seconds_max`: stop the
    turn after this time. `timeout`: the value of --timeout, whichever side measures the time.
    """

    form: str
    on_question: str = "ask"
    seconds_max: float | None = None
    timeout: float | None = None
    # The message about the effect of a second Ctrl-C, shown when the turn is being stopped.
    twice: str = "Ctrl-C again exits at once"


class TurnWatch:
    """Show one turn. Enter the loop first; everything here runs in its thread."""

    def __init__(
        self,
        loop: ScreenLoop,
        stops: Stops,
        client: Client,
        session: dict[str, Any],
        wishes: TurnOptions,
    ) -> None:
        self._loop = loop
        self._stops = stops
        self._client = client
        self._session = session
        self._wishes = wishes
        self.screen = PlainScreen(has_text=wishes.form == "text", has_lines=wishes.form == "text")
        self._teller = EventPrinter(self.screen, session["agent"])
        self._questions: list[question_view.QuestionView] = []
        # Questions answered by a key, until the log confirms the answer. The request may fail, and
        # the question is then asked again.
        self._sent: dict[str, question_view.QuestionView] = {}
        self._keyboard: Keyboard | None = None
        # The turns to show. A prompt that was added to another turn, or joined to it, is answered
        # there.
        self._mine: set[str] = set()
        self._turn = ""
        self._tells_gaps = True
        self._began = time.time()
        self._ended: dict[str, Any] | None = None
        self._ended_at = 0.0
        self._is_timed_out = False

    def watch(
        self, turn: str, *, after: str | None, follows: bool = True, tells_gaps: bool = True
    ) -> dict[str, Any]:
        """Show the turn until its end and return it.

        `after`: the cursor to follow from. `follows`: False for a turn that is over, whose outcome
        alone is shown. `tells_gaps`: report events that retention removed.
        """
        self._turn, self._mine, self._tells_gaps = turn, {turn}, tells_gaps
        self._stops.begin(self._session["id"], turn)
        held = limit_in_words(self._session, self._began) or budget_in_words(self._session)
        if held is not None and follows:
            self.screen.line(f"the session is {held}", TextStyle.BAD)
        self.screen.busy("waiting for the agent")
        is_partial = self._wishes.form == "text"
        if follows:
            follow(
                self._loop, self._client, self._session["id"], after=after, is_partial=is_partial
            )
        else:
            self._fetch_outcome()
        deadline = (
            None
            if self._wishes.seconds_max is None
            else time.monotonic() + self._wishes.seconds_max
        )
        try:
            while not self._is_over:
                for thing in self._loop.things(TICK_SECONDS):
                    self._take(thing)
                if deadline is not None and time.monotonic() >= deadline:
                    deadline = None
                    self._is_timed_out = True
                    self._stops.stop()
                self.screen.tick()
        finally:
            self._stop_asking()
            self.screen.close()
        assert self._ended is not None
        self._tell_end(self._ended)
        return self._ended

    @property
    def _is_over(self) -> bool:
        if self._ended is None:
            return False
        return not self._stops.is_due or time.monotonic() > self._ended_at + RECEIPT_SECONDS_MAX

    # -- input from the loop ----------------------------------------------------------------------
    def _take(self, thing: Thing) -> None:
        match thing:
            case EventReceived(event):
                self._event(event)
            case FeedEnded(error):
                raise error
            case Connected(is_there):
                if not is_there:
                    # Pipes get this line, too: the outage may last minutes, and nothing else would
                    # explain the pause.
                    self.screen.line("banksman: connection lost, trying again", TextStyle.ASKS)
                self.screen.busy(
                    "waiting for the agent" if is_there else "connection lost, trying again"
                )
            case Typed(key):
                self._key(key)
            case CallDone(errand, result, error):
                self._done(errand, result, error)
            case _:
                pass

    def _done(self, errand: str, result: Any, error: Exception | None) -> None:
        match errand:
            case "outcome" if error is not None:
                raise error
            case "outcome":
                if result["outcome"] is None:
                    self._fetch_outcome()
                else:
                    self._ended, self._ended_at = result, time.monotonic()
            case "stopping":
                # Without a first Ctrl-C there is no second one: an answer or a timeout stops it.
                twice = f"; {self._wishes.twice}" if self._stops.count else ""
                self.screen.line(f"stopping the turn{twice}", TextStyle.ASKS)
                self.screen.busy("stopping the turn")
            case "stopped":
                self._stops.is_due = False
                if error is None:
                    self.screen.line(receipt_in_words(result), TextStyle.ASKS)
                else:
                    self.screen.line(f"banksman: cannot stop the turn: {error}", TextStyle.BAD)
            case _ if errand.startswith(_ANSWER) and error is not None:
                self.screen.line(f"banksman: cannot answer the question: {error}", TextStyle.BAD)
                self._ask_again(errand.removeprefix(_ANSWER))
            case _:
                pass

    def _event(self, event: Event) -> None:
        if event["kind"] == "stream.gap":
            if self._tells_gaps:
                self.screen.line(
                    f"banksman: events {event['first']} to {event['last']} are no longer kept",
                    TextStyle.BAD,
                )
            return
        body = event["body"]
        if event["kind"] == "turn.started":
            if event["turn"] == self._turn and body.get("into"):
                self._mine.add(body["into"])
            elif self._turn in (body.get("joined") or ()):
                self._mine.add(event["turn"])
        if event["turn"] not in self._mine:
            if event["turn"] is None and event["kind"] in LIMIT_KINDS:
                self._teller.tell(event)
            return
        if self._wishes.form == "json":
            say_json(event)
        self._teller.tell(event)
        match event["kind"]:
            case "question.asked":
                self._asked(event)
            case "question.answered":
                self._answered(body)
            case "turn.ended" if event["turn"] == self._turn:
                self._fetch_outcome()
            case _:
                pass

    def _fetch_outcome(self) -> None:
        """Request the outcome of the turn, which has ended or is about to."""
        path = f"/v1/sessions/{segment(self._session['id'])}/turns/{segment(self._turn)}"
        self._loop.send(_OUTCOME, lambda: self._client.get(path, {"wait": WAIT_SECONDS}))

    # -- questions --------------------------------------------------------------------------------
    def _asked(self, event: Event) -> None:
        body = event["body"]
        question = question_view.question_of(body, event["turn"])
        match self._wishes.on_question:
            case "allow" | "deny" as decision:
                self._choose(
                    question, question_view.KeyChoice(decision, "", {"decision": decision})
                )
            case "fail":
                self.screen.block(question.subject)
                self.screen.line(
                    f"{question.title} stopping the turn, because on_question is fail",
                    TextStyle.BAD,
                )
                self._stops.stop()
            case _ if self._can_ask():
                self._questions.append(question)
                if len(self._questions) == 1:
                    self._put()
            case _:
                name = self._session["name"] or self._session["id"]
                self.screen.block(question.subject)
                self.screen.line(f"question: {question.title}", TextStyle.ASKS)
                self.screen.line(f"  {how_to_answer(name, question.id)}", TextStyle.ASKS)

    def _can_ask(self) -> bool:
        """Return whether a terminal shows the question and this process may read its keys."""
        if self._wishes.form == "json" or not stderr_style().is_terminal:
            return False
        if self._keyboard is None:
            self._keyboard = open_keyboard()
        return self._keyboard is not None

    def _put(self) -> None:
        assert self._keyboard is not None
        # Enter the keyboard first, which discards earlier input, and then show the question. So no
        # key can be older than the question.
        self._loop.listen(self._keyboard)
        self.screen.block(self._questions[0].subject)
        self.screen.line(self._questions[0].line(), TextStyle.ASKS)
        self.screen.busy("waiting for your answer")

    def _key(self, key: str) -> None:
        if not self._questions:
            return
        question = self._questions[0]
        choice = question.chosen(key)
        if choice is not None:
            self.screen.line(choice.name)
            if choice.body is not None:
                self._sent[question.id] = question
            self._choose(question, choice)
            self._forget(question.id)

    def _choose(
        self, question: question_view.QuestionView, choice: question_view.KeyChoice
    ) -> None:
        body = choice.body
        if body is None:
            self._stops.stop()
            return
        path = f"/v1/sessions/{segment(self._session['id'])}/questions/{segment(question.id)}"
        self._loop.send(f"{_ANSWER}{question.id}", lambda: self._client.post(path, body))

    def _ask_again(self, id: str) -> None:
        question = self._sent.pop(id, None)
        if question is not None:
            self._questions.insert(0, question)
            self._put()

    def _answered(self, body: dict[str, Any]) -> None:
        self._sent.pop(body["question"], None)
        if any(question.id == body["question"] for question in self._questions):
            self.screen.line(f"answered already: {body['answer']}, by {body['by']}")
            self._forget(body["question"])

    def _forget(self, id: str) -> None:
        self._questions = [question for question in self._questions if question.id != id]
        if self._questions:
            self._put()
        else:
            self._loop.stop_listening()
            self.screen.busy("waiting for the agent")

    def _stop_asking(self) -> None:
        self._loop.stop_listening()
        if self._keyboard is not None:
            self._keyboard.close()
            self._keyboard = None

    # -- end --------------------------------------------------------------------------------------
    def _tell_end(self, ended: dict[str, Any]) -> None:
        """Print the outcome, and the agent's text if it was not streamed."""
        form, outcome = self._wishes.form, ended["outcome"]
        if form == "json":
            say_json(ended)
            return
        if outcome["text"] and (form == "quiet" or not self._teller.said_any):
            say(as_text(outcome["text"]), end="" if outcome["text"].endswith("\n") else "\n")
        lost = "" if outcome["durable"] else " (the log could not be written)"
        told = outcome_in_words(
            outcome["kind"], outcome, time.time(), self._began, cause=self._cause(outcome)
        )
        self.screen.line(
            f"{told}{lost}", TextStyle.DIM if outcome["kind"] == "done" else TextStyle.PLAIN
        )

    def _cause(self, outcome: dict[str, Any]) -> str:
        """Return what interrupted the turn, if it was the --timeout of this verb."""
        timeout = self._wishes.timeout
        is_due = self._is_timed_out or outcome.get("clock") == "overall"
        if timeout is None or not is_due or outcome["kind"] != "interrupted":
            return ""
        return f": --timeout {timeout:g} s reached"
