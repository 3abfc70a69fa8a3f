"""`banksman ask`: one turn, watched to its end. What the agent says goes to stdout, everything else to stderr.

Ctrl-C stops the turn and not us: its ending is what was asked for, and comes in a moment. A second one leaves, and
the turn goes on being stopped without us. The first is told to the server by a thread of its own, so that nothing of
what the agent still says is torn out of the hands of the one who prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import sys
import threading
import uuid
from types import FrameType
from typing import Any

from banksman.cli import INTERRUPTED
from banksman.cli.acting import interrupt_turn, receipt_in_words
from banksman.cli.client import Client, segment
from banksman.cli.opening import add_cwd, ask_to_open
from banksman.cli.stream import Event, Follower
from banksman.cli.terminal import as_line, as_text, say, say_aside, say_json
from banksman.cli.verb import NOT_DONE, OK, Parser, client_of, perform, split_command
from banksman.cli.wording import QUESTION_CHARACTERS_MAX, how_to_answer, question_of, text_of, tools_of
from banksman.errors import BanksmanError, UsageError

# How long the server may hold one question for the outcome; then it is put again.
WAIT_SECONDS = 30
TOOL_CHARACTERS_MAX = 120


def ask(words: list[str]) -> int:
    parser = Parser(
        "ask",
        "SESSION PROMPT|- [options] [--open AGENT [--cwd FOLDER] [-- COMMAND …]]",
        "Ask the agent something, print what it says, and return when the turn is over: 0 if it is done. PROMPT - is\n"
        "read from stdin. Ctrl-C stops the turn (130, unless it was done by then); a second one leaves at once.",
        'banksman ask fix-ci "Why is CI red?" --open claude',
        streams=True,
    )
    parser.add_argument("session", metavar="SESSION", help="its id or its name; with --open its name")
    parser.add_argument("prompt", metavar="PROMPT", help="what to say; -: what is on stdin")
    parser.add_argument("--priority", metavar="P", help="interactive, normal, background, or a number")
    parser.add_argument("--on-busy", metavar="HOW", help="enqueue, reject, interrupt, steer or collect")
    parser.add_argument("--key", metavar="KEY", help="asked again with the same key, it is the same turn")
    parser.add_argument("--no-wait", action="store_true", help="return when it is accepted; print the turn's id")
    parser.add_argument("--open", metavar="AGENT", help="open the session first, if there is none of this name")
    add_cwd(parser)
    # Only a session that is opened has a command; else what is after -- is a prompt that begins with a dash.
    before, command = split_command(words)
    is_command = any(word == "--open" or word.startswith("--open=") for word in before)
    arguments = parser.read(before if is_command else words)
    arguments.command = command if is_command else None
    if arguments.open is None and arguments.cwd is not None:
        parser.error("--cwd is for a session that is opened: see --open")
    return perform(_ask, arguments)


def _ask(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    body = _body(arguments)
    if arguments.open is not None:
        session = ask_to_open(client, arguments, agent=arguments.open, name=arguments.session)
    else:
        session = client.get(f"/v1/sessions/{segment(arguments.session)}")
    with _Stops(client, session["id"]) as stops:
        turns = f"/v1/sessions/{segment(session['id'])}/turns"
        # With a key of our own where none was given: if the answer is lost on its way, it is still asked once.
        accepted = client.post(turns, body, key=arguments.key or uuid.uuid4().hex)
        if arguments.no_wait:
            if arguments.format == "json":
                say_json(accepted)
            else:
                say(as_line(accepted["turn"]))
            return OK
        turn: str = accepted["turn"]
        stops.begin(turn)
        if arguments.key is None:
            # From the place before it was asked on: nothing of it can lie in front of that.
            after = str(session["seq"])
        else:
            # It may be a turn of before, and have begun anywhere.
            after = None
        said_any = False
        # A turn of before that is over may be one that the log no longer has: its outcome says what it said.
        if after is not None or accepted["state"] != "ended":
            said_any = _watch(Follower(client, session["id"], after=after), turn, arguments, session)
        ended = _wait_ended(client, f"{turns}/{segment(turn)}")
    _tell(ended, arguments, said_any=said_any)
    if ended["outcome"]["kind"] == "done":
        return OK
    return INTERRUPTED if stops.count else NOT_DONE


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    prompt: str = arguments.prompt
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as exc:
            raise UsageError("what is on stdin is not UTF-8") from exc
    body: dict[str, Any] = {"prompt": prompt}
    if arguments.priority is not None:
        try:
            body["priority"] = int(arguments.priority)
        except ValueError:
            body["priority"] = arguments.priority
    if arguments.on_busy is not None:
        body["on_busy"] = arguments.on_busy
    return body


def _watch(follower: Follower, turn: str, arguments: argparse.Namespace, session: dict[str, Any]) -> bool:
    """Show the turn until it ends. True: the agent said something in it."""
    # A prompt that was added to another turn, or joined to one, is answered in that one.
    mine = {turn}
    said_any = False
    with contextlib.closing(follower.events()) as events:
        for event in events:
            if event["kind"] == "stream.gap":
                if arguments.key is None:
                    say_aside(f"banksman: events {event['first']} to {event['last']} are no longer kept")
                continue
            if event["kind"] == "turn.started":
                body = event["body"]
                if event["turn"] == turn and body.get("into"):
                    mine.add(body["into"])
                elif turn in (body.get("joined") or ()):
                    mine.add(event["turn"])
            if event["turn"] in mine:
                said_any = _show(event, arguments, session) or said_any
            if event["kind"] == "turn.ended" and event["turn"] == turn:
                break
    return said_any


def _show(event: Event, arguments: argparse.Namespace, session: dict[str, Any]) -> bool:
    """One event of the turn. True: the agent said something in it."""
    if arguments.format == "json":
        say_json(event)
        return True
    if arguments.format == "quiet":
        return False
    text = text_of(event)
    if text:
        # A chunk is a whole block of text: what the agent says next begins on a line of its own.
        say(as_text(text), end="" if text.endswith("\n") else "\n")
    for tool in tools_of(event):
        say_aside(f"[{as_line(tool, characters_max=TOOL_CHARACTERS_MAX)}]")
    if event["kind"] == "question.asked":
        question = event["body"]["question"]
        name = session["name"] or session["id"]
        say_aside(as_line(f"question: {question_of(event['body'])}", characters_max=QUESTION_CHARACTERS_MAX))
        say_aside(as_line(f"  {how_to_answer(name, question)}"))
    return bool(text)


def _wait_ended(client: Client, path: str) -> dict[str, Any]:
    """The turn with its outcome. It has ended, or does so in a moment."""
    while True:
        found = client.get(path, {"wait": WAIT_SECONDS})
        if found["outcome"] is not None:
            return found


def _tell(ended: dict[str, Any], arguments: argparse.Namespace, *, said_any: bool) -> None:
    """How it ended; and what it said, if that was not shown as it came."""
    if arguments.format == "json":
        say_json(ended)
        return
    outcome = ended["outcome"]
    if outcome["text"] and not said_any:
        say(as_text(outcome["text"]), end="" if outcome["text"].endswith("\n") else "\n")
    if arguments.format == "quiet":
        return
    cost = "" if outcome["cost"] is None else f", ${outcome['cost']:.4f}"
    clock = f" by the {outcome['clock']} clock" if outcome["clock"] else ""
    error = f": {outcome['error']}" if outcome["error"] else ""
    lost = "" if outcome["durable"] else " (the log could not be written)"
    say_aside(as_line(f"{outcome['kind']}{clock}{cost}{error}{lost}"))


class _Stops:
    """Ctrl-C, counted. The first one that finds the turn known, or that came before it was, stops it."""

    def __init__(self, client: Client, session: str) -> None:
        self.count = 0
        self._client = client
        self._session = session
        self._before: Any = None
        self._thread: threading.Thread | None = None
        # True: stop it. False: it is over. To put into one of these is allowed in a signal handler.
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __enter__(self) -> _Stops:
        self._before = signal.getsignal(signal.SIGINT)
        # Ignored when we were started: that is how a shell keeps its Ctrl-C from what runs in the background.
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        # Not waited for: it may hang in a request, and nobody is interested in its answer any more.
        self._wishes.put(False)

    def begin(self, turn: str) -> None:
        # A daemon, so that it cannot keep the program when a second Ctrl-C ends it.
        self._thread = threading.Thread(target=self._stop, args=(turn,), name="banksman-interrupt", daemon=True)
        self._thread.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self._wishes.put(True)

    def _stop(self, turn: str) -> None:
        if not self._wishes.get():
            return
        say_aside("stopping the turn; once more leaves at once")
        try:
            receipt = interrupt_turn(self._client, self._session, turn)
        except BanksmanError as exc:
            say_aside(f"banksman: the turn could not be stopped: {as_line(exc)}")
        else:
            say_aside(as_line(receipt_in_words(receipt)))
