"""`banksman usage`: show tokens, cost and working time of all turns in the store. Read-only."""

from __future__ import annotations

import argparse
import contextlib

from banksman.cli import OK
from banksman.cli.output import as_line, cut, say, say_json, table
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.screen import seconds_in_words
from banksman.cli.tui.session_table import Shown, cap_in_words, money

# A caller's name may have 200 characters. JSON has all of them.
KEY_COLUMNS_MAX = 60
BY = ("day", "session", "agent", "caller")

_DESCRIPTION = """\
Show the usage of all turns in the store: tokens, cost and working time. The cost is the agent's own
estimate. Days are in UTC. Deleted sessions stay counted."""


def parser() -> ServerParser:
    flags = ServerParser(
        "usage",
        "[--by day|session|agent|caller] [--since DAY] [--until DAY]",
        _DESCRIPTION,
        "banksman usage --by caller --since 2026-11-01",
        only_reads=True,
    )
    flags.add_argument("--by", choices=BY, default="day", help="what a row is (default: day)")
    flags.add_argument("--since", type=_day, metavar="DAY", help="first day, as YYYY-MM-DD")
    flags.add_argument("--until", type=_day, metavar="DAY", help="last day, as YYYY-MM-DD")
    return flags


def _day(text: str) -> str:
    # Imported here, because the verb starts faster without a day.
    import datetime  # noqa: PLC0415

    with contextlib.suppress(ValueError):
        # Python also reads other forms of a day, such as 20261118.
        if datetime.date.fromisoformat(text).isoformat() == text:
            return text
    raise argparse.ArgumentTypeError(f"the day cannot be {text!r:.60}: use YYYY-MM-DD, in UTC")


def main(words: list[str]) -> int:
    return perform(_usage, parser().read(words))


def _usage(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in ("by", "since", "until")}
    found = client_of(arguments).get("/v1/usage", wanted)
    rows: list[Shown] = found["rows"]
    match arguments.format:
        case "json":
            say_json(found)
        case "quiet":
            for row in rows:
                say(as_line("-" if row["key"] is None else row["key"]))
        case _ if not rows:
            say("no usage; run `banksman usage --help` for the flags")
        case _:
            head = (found["by"].upper(), "TURNS", "INPUT", "OUTPUT", "CACHE READ", "CACHE WRITE")
            table((*head, "WORKING", "COST (EST.)"), [_cells(row) for row in rows])
            for use in found.get("budgets", ()):
                say(f"budget: {cap_in_words(use)}")
    return OK


def _cells(row: Shown) -> tuple[object, ...]:
    usage = row["usage"]
    tokens = usage["tokens"]
    kinds = ("input", "output", "cache_read", "cache_write")
    return (
        None if row["key"] is None else cut(as_line(row["key"]), KEY_COLUMNS_MAX),
        usage["turns"],
        *(f"{tokens[kind]:,}" for kind in kinds),
        seconds_in_words(usage["working_seconds"]),
        money(usage["usd"]),
    )
