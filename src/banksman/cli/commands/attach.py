"""`banksman attach`: show a session live, with an input line for asks and answers.

The screen with the input line is in `tui/attached.py`. Without a terminal, this module prints the
events as text or JSON and takes no input. Leaving does not affect a session of a server. Everything
on the screen comes from the log, earlier events as well as new ones. Nothing is therefore shown
twice or left out when the connection or the server fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from banksman.cli import INTERRUPTED
from banksman.cli.client.client import Client, segment
from banksman.cli.client.locate import ServerLocator
from banksman.cli.output import is_terminal, say_json, stdout_style
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.attached import AttachScreen
from banksman.cli.tui.event_loop import (
    Connected,
    EventReceived,
    FeedEnded,
    ScreenLoop,
    Signalled,
    follow,
)
from banksman.cli.tui.event_view import EventPrinter
from banksman.cli.tui.keyboard import Keyboard, open_keyboard
from banksman.cli.tui.screen import PlainScreen, TextStyle

# The amount of history to show: the last turns, limited to this number of events.
TURNS_SHOWN, EVENTS_SHOWN_MAX = 3, 3000
OWN_EVENTS_MAX = 60


_DESCRIPTION = """\
Watch a session live and talk in it. Each line that you type is a prompt, with interactive
priority by default (normal for the role asker). Ctrl-J starts a new line of the prompt. While the
line is empty, a key answers the agent's question. Ctrl-C stops the running turn. Without a
running turn, or pressed twice, Ctrl-C leaves, and so does Ctrl-D; the session continues. If the
server goes away, attach waits for it. Without a terminal, attach only shows the session, until
Ctrl-C."""


def parser() -> ServerParser:
    flags = ServerParser(
        "attach",
        "SESSION [--priority P]",
        _DESCRIPTION,
        "banksman attach fix-ci",
        streams=True,
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument(
        "--priority",
        metavar="P",
        help="priority of typed prompts (default: interactive, or normal for the role asker)",
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_attach, parser().read(words))


def _attach(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    keyboard = _keyboard(arguments)
    if keyboard is not None:
        with keyboard:
            return attach_to(
                client, arguments.session, keyboard, priority=arguments.priority, way=arguments.way
            )
    session: dict[str, Any] = client.get(f"/v1/sessions/{segment(arguments.session)}")
    with ScreenLoop() as loop:
        return _watch(loop, client, session, _begin(client, session), arguments)


def attach_to(
    client: Client,
    session: str,
    keyboard: Keyboard,
    *,
    priority: str | None = None,
    way: ServerLocator | None = None,
) -> int:
    """Attach at this terminal until the user leaves. Does not close the keyboard."""
    found: dict[str, Any] = client.get(f"/v1/sessions/{segment(session)}")
    after = _begin(client, found)
    if priority is None:
        # The server refuses asks of an asker that would preempt those of others.
        is_asker = client.get("/v1/caller")["role"] == "asker"
        priority = "normal" if is_asker else "interactive"
    with ScreenLoop() as loop:
        attached = AttachScreen(loop, client, found, keyboard, priority=priority)
        return attached.run(after, is_alone=way is not None and way.is_embedded)


def _keyboard(arguments: argparse.Namespace) -> Keyboard | None:
    """Open the keyboard. Return None without a terminal for input, or one that can redraw lines."""
    is_drawn = arguments.format == "text" and stdout_style().is_drawn and is_terminal(sys.stdin)
    return open_keyboard() if is_drawn else None


def _begin(client: Client, session: dict[str, Any]) -> str:
    """Return the cursor at which the last turns begin."""
    head: int = session["seq"]
    first = max(0, head - EVENTS_SHOWN_MAX)
    path = f"/v1/sessions/{segment(session['id'])}/events"
    own = client.get(path, {"before": head + 1, "limit": OWN_EVENTS_MAX, "frames": 0})["events"]
    begun = [event["seq"] for event in own if event["kind"] == "turn.queued"]
    return str(max(first, begun[-TURNS_SHOWN:][0] - 1 if begun else 0))


def _watch(
    loop: ScreenLoop,
    client: Client,
    session: dict[str, Any],
    after: str,
    arguments: argparse.Namespace,
) -> int:
    """Show the session without a keyboard, as text or as JSON events."""
    form = arguments.format
    screen = PlainScreen(hint="Ctrl-C leaves", has_text=form != "json", has_lines=form == "text")
    teller = EventPrinter(screen, session["agent"], is_whole_session=True)
    loop.catch(signal.SIGINT)
    follow(loop, client, session["id"], after=after, is_partial=form != "json")
    try:
        while True:
            for thing in loop.things(1.0):
                match thing:
                    case EventReceived(event) if form == "json":
                        say_json(event)
                    case EventReceived(event) if event["kind"] != "stream.gap":
                        teller.tell(event)
                    case Connected(is_there):
                        screen.line(
                            "connected again" if is_there else "connection lost, trying again",
                            TextStyle.ASKS,
                        )
                    case FeedEnded(error):
                        raise error
                    case Signalled():
                        return INTERRUPTED
                    case _:
                        pass
            screen.tick()
    finally:
        screen.close()
