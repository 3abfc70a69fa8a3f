"""`banksman ask`: run one turn in a session and print it until its end.

`--open` opens the session first. `--no-wait` prints only the id of the turn. `tui/turn_view.py`
shows the turn and handles Ctrl-C. If this process leaves early, the turn continues on the server.
An embedded host ends with this process and stops the turn.
"""

from __future__ import annotations

import argparse
import uuid

from banksman.cli import INTERRUPTED, NOT_DONE, OK
from banksman.cli.arguments import split_command
from banksman.cli.client.client import segment
from banksman.cli.containment_flags import add_containment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import (
    ServerParser,
    add_budget,
    add_caller,
    add_cwd,
    add_deadline,
    add_fallback,
    ask_to_open,
    body_of,
    check_deadline,
    client_of,
    perform,
)
from banksman.cli.tui.event_loop import ScreenLoop
from banksman.cli.tui.turn_view import Stops, TurnOptions, TurnWatch

# Flags that say how a session is opened.
_OF_OPEN = (
    *("cwd", "fallback", "budget", "on_budget"),
    *("user", "limit", "scrub", "wrap", "sandbox", "on_open", "on_close"),
)
_DESCRIPTION = """\
Send a prompt to a session, print the answer, and return when the turn is over. The exit code
is 0 if the turn is done. If PROMPT is -, it is read from stdin. Ctrl-C stops the turn (130,
unless the turn was done by then); a second Ctrl-C exits at once."""


def parser() -> ServerParser:
    flags = ServerParser(
        "ask",
        "SESSION PROMPT|- [options] [--open AGENT [--cwd FOLDER] [options] [-- COMMAND …]]",
        _DESCRIPTION,
        'banksman ask fix-ci "Why is CI red?" --open claude',
        streams=True,
    )
    flags.add_argument(
        "session", metavar="SESSION", help="id or name of the session; with --open, its name"
    )
    flags.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    flags.add_argument(
        "--priority", metavar="P", help="interactive, normal, background, or a number"
    )
    flags.add_argument(
        "--on-busy",
        metavar="HOW",
        help="if a turn is running: enqueue, reject, interrupt, steer or collect",
    )
    flags.add_argument(
        "--key", metavar="KEY", help="idempotency key: an ask with the same key is the same turn"
    )
    flags.add_argument("--hold", metavar="ID", help="hold that the ask belongs to: see `hold`")
    add_deadline(flags)
    add_caller(flags)
    flags.add_argument(
        "--no-wait",
        action="store_true",
        help="return when the ask is accepted, and print the turn's id",
    )
    flags.add_argument(
        "--open",
        metavar="AGENT",
        help="open the session with this agent first, if it does not exist",
    )
    add_cwd(flags)
    add_fallback(flags)
    add_containment(flags)
    add_budget(flags)
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    # Only with --open is there a command after `--`. Otherwise the words after `--` are a prompt
    # that begins with a dash.
    before, command = split_command(words)
    is_command = any(word == "--open" or word.startswith("--open=") for word in before)
    arguments = flags.read(before if is_command else words)
    arguments.command = command if is_command else None
    check_deadline(flags, arguments)
    for name in _OF_OPEN if arguments.open is None else ():
        # Ignored, a flag such as --sandbox would promise what the session does not have.
        if getattr(arguments, name) is not None:
            flags.error(f"cannot use --{name.replace('_', '-')} without --open")
    return perform(_ask, arguments)


def _ask(arguments: argparse.Namespace) -> int:
    client = client_of(
        arguments,
        needs_server="with --no-wait an embedded host would end before the turn"
        if arguments.no_wait
        else "",
    )
    body = body_of(arguments)
    if arguments.open is not None:
        session = ask_to_open(client, arguments, agent=arguments.open, name=arguments.session)
    else:
        session = client.get(f"/v1/sessions/{segment(arguments.session)}")
    with ScreenLoop() as loop:
        stops = Stops(loop, client)
        # Without --key, a random key makes the request idempotent. A lost reply then cannot lead to
        # a second turn.
        key = arguments.key or uuid.uuid4().hex
        accepted = client.post(f"/v1/sessions/{segment(session['id'])}/turns", body, key=key)
        if arguments.no_wait:
            if arguments.format == "json":
                say_json(accepted)
            else:
                say(as_line(accepted["turn"]))
            return OK
        # Follow the log from the position before the ask: no event of the new turn lies before it.
        # With --key the turn may be an earlier one. It may have begun anywhere in the log, and if
        # it is over, the log may have dropped its events.
        is_new = arguments.key is None
        ended = TurnWatch(loop, stops, client, session, TurnOptions(form=arguments.format)).watch(
            accepted["turn"],
            after=str(session["seq"]) if is_new else None,
            follows=is_new or accepted["state"] != "ended",
            tells_gaps=is_new,
        )
    if ended["outcome"]["kind"] == "done":
        return OK
    return INTERRUPTED if stops.count else NOT_DONE
