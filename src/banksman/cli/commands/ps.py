"""`banksman ps`: list sessions, and the programs that the server runs as commands. Read-only.

Without `--all`, the list has no ended commands, and the text output shows only the last ten
sessions that are over. The layout is in this module. `tui/session_table.py` fetches the sessions
and defines the order of their states.
"""

from __future__ import annotations

import argparse
import sys
import time

from banksman.cli import OK
from banksman.cli.output import (
    as_line,
    cut,
    padded,
    say,
    say_json,
    size_of,
    stdout_style,
    table,
    width,
)
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.screen import seconds_in_words
from banksman.cli.tui.session_table import (
    ORDER,
    Shown,
    budget_in_words,
    colour_of,
    limit_in_words,
    money,
    sessions,
)

COMMAND_CHARACTERS_MAX = 60
# How many ended sessions the text output shows without --all.
GONE_SHOWN = 10

# Columns in display order.
_HEADS = {
    "state": "STATE",
    "name": "NAME",
    "id": "SESSION",
    "agent": "AGENT",
    "host": "HOST",
    "holder": "HOLDER",
    "by": "BY",
    "queue": "QUEUE",
    "questions": "ASKS",
    "limit": "LIMIT",
    "cost": "COST",
    "last": "LAST",
}
# Columns to drop on a narrow terminal, in this order. The state and the name always stay.
_DROPPED = ("holder", "by", "cost", "agent", "queue", "last", "host", "questions", "limit", "id")
# Columns that are shown only if some session has a value for them.
_RARE = ("host", "by", "limit")
_NAME_COLUMNS_MIN = 8


_DESCRIPTION = """\
List the sessions, most urgent first, and the running commands. A session that is over starts
again at the next ask."""


def parser() -> ServerParser:
    flags = ServerParser(
        "ps",
        "[--all]",
        _DESCRIPTION,
        "banksman ps --json",
    )
    flags.add_argument(
        "-a",
        "--all",
        action="store_true",
        help="also list ended commands, and all sessions that are over",
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_ps, parser().read(words))


def _ps(arguments: argparse.Namespace) -> int:
    client = client_of(arguments)
    shown = list(sessions(client))
    commands: list[Shown] = client.get("/v1/commands")["commands"]
    commands = [each for each in commands if arguments.all or each["finished"] is None]
    match arguments.format:
        case "json":
            say_json({"sessions": shown, "commands": commands})
        case "quiet":
            for each in (*shown, *commands):
                say(as_line(each["id"]))
        case _:
            _show_all(shown, commands, is_all=arguments.all)
    return OK


def _show_all(shown: list[Shown], commands: list[Shown], *, is_all: bool) -> None:
    # Sessions that need attention come first, then the most recent ones.
    ordered = sorted(shown, key=lambda each: (_rank(each), -(each["at"] or each["created"])))
    gone = [each for each in ordered if each["state"] == "gone"]
    hidden = [] if is_all else gone[GONE_SHOWN:]
    _show_sessions([each for each in ordered if each not in hidden])
    if hidden:
        say(f"{len(hidden)} more sessions are over: run `banksman ps --all`")
    if commands:
        if shown:
            say()
        head = ("COMMAND", "STATE", "PID", "ARGV")
        table(
            head,
            [(each["id"], _state(each), each["pid"], _argv(each["argv"])) for each in commands],
        )
    if not shown and not commands:
        say("no sessions and no running commands; run `banksman open AGENT`")


def _rank(session: Shown) -> int:
    return ORDER.index(session["state"]) if session["state"] in ORDER else len(ORDER)


def _show_sessions(shown: list[Shown]) -> None:
    rows = [_cells(each) for each in shown]
    if not rows:
        return
    # The host column is useless if all sessions are on one machine.
    needless = [name for name in _RARE if all(row[name] == "-" for row in rows)]
    heads = {name: head for name, head in _HEADS.items() if name not in needless}
    style = stdout_style()
    if not style.is_terminal:
        table(tuple(heads.values()), [tuple(row[name] for name in heads) for row in rows])
        return
    columns = size_of(sys.stdout)[0]
    widths = _widths(heads, rows, columns)
    say(style.bold(_line(heads, widths, columns)))
    for each, row in zip(shown, rows, strict=True):
        line = _line(row, widths, columns)
        # Only the state is coloured, because a table full of colours is hard to read.
        say(colour_of(style, each["state"])(line[: widths["state"]]) + line[widths["state"] :])


def _cells(session: Shown) -> dict[str, str]:
    said: dict[str, object] = {
        "state": session["state"],
        "name": session["name"],
        "id": session["id"],
        "agent": session["agent"],
        "host": session.get("host"),
        "holder": session["holder"] or session["hold"],
        "by": session.get("holder_caller") or _hold_caller(session),
        "queue": len(session["queue"]),
        "questions": len(session["questions"]),
        "limit": limit_in_words(session, time.time()) or budget_in_words(session),
        "cost": money(session["cost"]),
        "last": _ago(session["at"]),
    }
    return {
        name: "-" if value is None or value == "" else as_line(value)
        for name, value in said.items()
    }


def _hold_caller(session: Shown) -> str | None:
    """Return who holds the session; a turn of another caller may run in it meanwhile."""
    holds = session.get("holds") or ()
    return holds[0]["caller"] if session["hold"] and holds and not session["holder"] else None


def _ago(at: float | None) -> str | None:
    return None if at is None else f"{seconds_in_words(max(0.0, time.time() - at))} ago"


def _widths(heads: dict[str, str], rows: list[dict[str, str]], columns: int) -> dict[str, int]:
    """Return the widths of the columns that fit."""
    widths = {
        name: max(width(head), *(width(row[name]) for row in rows)) for name, head in heads.items()
    }
    # A session without a name is identified only by its id, so the id column must stay.
    kept = () if all(row["name"] != "-" for row in rows) else ("id",)
    for name in (each for each in _DROPPED if each not in kept):
        if sum(widths.values()) + 2 * (len(widths) - 1) <= columns:
            break
        widths.pop(name, None)
    excess = sum(widths.values()) + 2 * (len(widths) - 1) - columns
    widths["name"] = max(min(_NAME_COLUMNS_MIN, widths["name"]), widths["name"] - max(0, excess))
    return widths


def _line(said: dict[str, str], widths: dict[str, int], columns: int) -> str:
    return cut(
        "  ".join(padded(cut(said[name], size), size) for name, size in widths.items()).rstrip(),
        columns,
    )


def _state(command: Shown) -> str:
    finished = command["finished"]
    if finished is None:
        return str(command["state"])
    if finished["signal"] is not None:
        return f"{finished['ended']}, signal {finished['signal']}"
    return f"{finished['ended']}, code {finished['code']}"


def _argv(argv: list[str]) -> str:
    return as_line(" ".join(argv), characters_max=COMMAND_CHARACTERS_MAX)
