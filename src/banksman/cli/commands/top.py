"""`banksman top`: live table of all sessions, with keys to attach and to interrupt.

The live table is in `tui/session_board.py`. With `--once`, or without a terminal, this module
prints the table once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from banksman.cli import OK
from banksman.cli.output import as_line, is_terminal, say, say_json, stdout_style, table
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui import session_table
from banksman.cli.tui.event_loop import ScreenLoop
from banksman.cli.tui.keyboard import open_keyboard
from banksman.cli.tui.session_board import SessionBoard
from banksman.cli.tui.session_table import SessionRows

INTERVAL_SECONDS = 2.0


_DESCRIPTION = """\
Show a live table of all sessions, most urgent first: sessions with a question, with a problem,
running, queued, idle. j, k and the arrow keys select a session, Enter attaches to it, i
interrupts it, ? shows help, q quits. Without a terminal, the table is printed once."""


def parser() -> ServerParser:
    flags = ServerParser(
        "top",
        "[--interval S] [--once]",
        _DESCRIPTION,
        "banksman top --once",
    )
    flags.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_SECONDS,
        metavar="S",
        help=(
            "seconds between updates of memory and processes "
            f"(default: {INTERVAL_SECONDS:g}); the rest is live"
        ),
    )
    flags.add_argument("--once", action="store_true", help="print the table once, and exit")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if not 0.5 <= arguments.interval <= 3600:
        flags.error("--interval must be a number of seconds from 0.5 to 3600")
    return perform(_top, arguments)


def _top(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    survey = SessionRows(client)
    rows = survey.all()
    is_drawn = arguments.format == "text" and stdout_style().is_drawn and is_terminal(sys.stdin)
    keyboard = open_keyboard() if is_drawn and not arguments.once else None
    if keyboard is None:
        ordered = sorted(rows.values(), key=lambda row: row.rank)
        match arguments.format:
            case "json":
                say_json({"sessions": [dataclasses.asdict(row) for row in ordered]})
            case "quiet":
                for row in ordered:
                    say(as_line(row.id))
            case _ if ordered:
                table(*session_table.plain(ordered, time.time()))
            case _:
                say("no sessions; run `banksman run AGENT PROMPT` to ask an agent")
        return OK
    with keyboard, ScreenLoop() as loop:
        return SessionBoard(loop, client, survey, rows, keyboard, interval=arguments.interval).run()
