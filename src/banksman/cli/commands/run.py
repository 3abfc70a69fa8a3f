"""`banksman run`: open a session, run one turn to its end, and close the session.

With `--keep` or `--name` the session stays open. `tui/turn_view.py` shows the turn. Ctrl-C stops
the turn. A second Ctrl-C closes the session, ends its agent, and then exits. A thread opens the
session. The main thread can therefore wait for its id and close it, however early the user wants to
leave.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
import uuid
from types import FrameType
from typing import Any

from banksman import config
from banksman.cli import INTERRUPTED, NOT_DONE, OK
from banksman.cli.arguments import split_command
from banksman.cli.client.client import Client, segment
from banksman.cli.containment_flags import add_containment
from banksman.cli.output import as_line, is_terminal, say_aside
from banksman.cli.server_command import (
    ServerParser,
    add_budget,
    add_caller,
    add_cwd,
    add_deadline,
    add_fallback,
    add_on_limit,
    ask_to_open,
    body_of,
    check_deadline,
    client_of,
    perform,
)
from banksman.cli.tui.event_loop import CallDone, ScreenLoop
from banksman.cli.tui.screen import TICK_SECONDS, PlainScreen
from banksman.cli.tui.turn_view import Stops, TurnOptions, TurnWatch
from banksman.errors import BanksmanError, UsageError

ON_QUESTION = ("ask", "allow", "deny", "fail")
# A user may leave while the session is being opened. The verb waits this long to learn which
# session to close.
OPENED_SECONDS_MAX = 10.0


_DESCRIPTION = """\
Open a session, send one prompt, print the answer, and close the session when the turn is over.
The exit code is 0 if the turn is done. If PROMPT is - or missing, it is read from stdin. COMMAND
replaces the agent's command. Ctrl-C stops the turn (130, unless the turn was done by then); a
second Ctrl-C ends the session at once. A key answers a question of the agent. Without a
terminal, the question waits for `banksman answer`."""


def parser() -> ServerParser:
    flags = ServerParser(
        "run",
        "AGENT [PROMPT|-] [options] [-- COMMAND …]",
        _DESCRIPTION,
        'banksman run claude "Why is CI red?"',
        streams=True,
        in_memory=True,
    )
    flags.add_argument(
        "agent", metavar="AGENT", help="a known agent, such as claude; see banksman agents"
    )
    flags.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; if it is - or missing, it is read from stdin",
    )
    add_cwd(flags)
    add_fallback(flags)
    add_containment(flags)
    add_budget(flags)
    flags.add_argument(
        "--name",
        metavar="NAME",
        help="name the session and keep it; if the name exists, continue that session",
    )
    flags.add_argument("--keep", action="store_true", help="do not close the session at the end")
    flags.add_argument("--model", metavar="MODEL", help="model, as the agent names it")
    flags.add_argument(
        "--permission-mode", metavar="MODE", help="permission mode, as the agent names it"
    )
    flags.add_argument(
        "--priority", metavar="P", help="interactive, normal, background, or a number"
    )
    add_caller(flags)
    flags.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="stop the turn after S seconds, not counting the wait for answers",
    )
    add_deadline(flags)
    add_on_limit(flags)
    flags.add_argument(
        "--on-question",
        choices=ON_QUESTION,
        help="how to answer a question (default: ask); fail stops the turn",
    )
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    before, command = split_command(words)
    arguments = flags.read(before)
    arguments.command = command
    if command == []:
        flags.error("no command after --")
    if arguments.timeout is not None and not 0 < arguments.timeout < 1e8:
        flags.error("--timeout must be a number of seconds greater than 0")
    check_deadline(flags, arguments)
    if arguments.prompt is None and is_terminal(sys.stdin):
        flags.error(
            f'no prompt was given; run `banksman run {arguments.agent} "PROMPT"`, '
            "or pass the prompt on stdin: "
            f"`banksman run {arguments.agent} < FILE`"
        )
    return perform(_run, arguments)


def _run(arguments: argparse.Namespace) -> int:
    found = config.load(
        flags={
            "run.priority": arguments.priority,
            "run.on_question": arguments.on_question,
            "run.on_limit": arguments.on_limit,
        }
    )
    arguments.priority = found.value("run.priority")
    arguments.on_limit = found.value("run.on_limit")
    body = body_of(arguments)
    if not str(body["prompt"]).strip():
        raise UsageError("cannot ask: the prompt is empty")
    client = client_of(arguments)
    # An embedded host must be started by the main thread, because only that thread can handle
    # signals.
    _ = client.place
    with ScreenLoop() as loop:
        stops = Stops(loop, client)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.handle(number, _leave)
        opening = _Opening(loop, client, arguments)
        try:
            session = opening.wait()
            accepted = client.post(f"{_path(session)}/turns", body, key=uuid.uuid4().hex)
            wishes = TurnOptions(
                form=arguments.format,
                on_question=found.value("run.on_question"),
                # An existing session keeps the timeouts of its creation, so this verb measures the
                # time.
                seconds_max=None if arguments.name is None else arguments.timeout,
                timeout=arguments.timeout,
                twice="Ctrl-C again exits at once"
                if _is_kept(arguments)
                else "Ctrl-C again ends the session",
            )
            watch = TurnWatch(loop, stops, client, session, wishes)
            ended = watch.watch(accepted["turn"], after=str(session["seq"]))
        finally:
            if not _is_kept(arguments):
                opening.close()
    if arguments.keep and arguments.format == "text":
        say_aside(
            as_line(f"the session stays open: banksman attach {session['name'] or session['id']}")
        )
    if ended["outcome"]["kind"] == "done":
        return OK
    return INTERRUPTED if stops.count else NOT_DONE


def _is_kept(arguments: argparse.Namespace) -> bool:
    return arguments.keep or arguments.name is not None


def _more(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the further parameters for opening the session: model, timeout and others."""
    more = {name: getattr(arguments, name) for name in ("model", "permission_mode")}
    if arguments.on_limit != "fail":
        more["on_limit"] = arguments.on_limit
    if arguments.timeout is not None and arguments.name is None:
        more["options"] = {"clocks": {"overall": arguments.timeout}}
    return {name: value for name, value in more.items() if value is not None}


class _Opening:
    """A session that is being opened, and its close.

    The session is opened exactly once, even if the connection is lost, and closed once.
    """

    def __init__(self, loop: ScreenLoop, client: Client, arguments: argparse.Namespace) -> None:
        self._loop = loop
        self._client = client
        self._agent: str = arguments.agent
        self._session: dict[str, Any] | None = None
        self._is_settled = False
        name, more = arguments.name, _more(arguments)
        loop.send(
            "open", lambda: ask_to_open(client, arguments, agent=self._agent, name=name, more=more)
        )

    def wait(self) -> dict[str, Any]:
        screen = PlainScreen()
        screen.busy(f"opening a session with {self._agent}")
        try:
            while not self._is_settled:
                self._look(TICK_SECONDS)
                screen.tick()
        finally:
            screen.close()
        assert self._session is not None
        return self._session

    def close(self) -> None:
        """Close the session. Its whole process tree has ended when this returns.

        Another Ctrl-C stops the wait and leaves the close to the server.
        """
        deadline = time.monotonic() + OPENED_SECONDS_MAX
        while not self._is_settled and time.monotonic() < deadline:
            with contextlib.suppress(BanksmanError):
                self._look(TICK_SECONDS)
        if self._session is None:
            return
        screen = PlainScreen(hint="")
        screen.busy("closing the session")
        session = self._session
        self._loop.send("close", lambda: self._client.request("DELETE", _path(session)))
        try:
            while True:
                for thing in self._loop.things(TICK_SECONDS):
                    if isinstance(thing, CallDone) and thing.errand == "close":
                        if thing.error is not None:
                            say_aside(
                                f"banksman: cannot close session {session['id']}: "
                                f"{as_line(thing.error)}"
                            )
                        return
                screen.tick()
        finally:
            screen.close()

    def _look(self, seconds: float) -> None:
        for thing in self._loop.things(seconds):
            if isinstance(thing, CallDone) and thing.errand == "open":
                self._is_settled, self._session = True, thing.result
                if thing.error is not None:
                    raise thing.error


def _path(session: dict[str, Any]) -> str:
    return f"/v1/sessions/{segment(session['id'])}"


def _leave(number: int, frame: FrameType | None) -> None:
    # Ignore a repeated signal, so that it cannot interrupt the cleanup.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
