"""`banksman interrupt`: stop a running turn, or withdraw one that waits in the queue."""

from __future__ import annotations

import argparse

from banksman.cli import OK
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import (
    ServerParser,
    client_of,
    interrupt_turn,
    perform,
    receipt_in_words,
)


def parser() -> ServerParser:
    flags = ServerParser(
        "interrupt",
        "SESSION [TURN]",
        "Interrupt the running turn, or TURN. "
        "A turn in the queue is withdrawn. Returns when the turn is over.",
        "banksman interrupt fix-ci",
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument(
        "turn", nargs="?", metavar="TURN", help="id of the turn (default: the running turn)"
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_interrupt, parser().read(words))


def _interrupt(arguments: argparse.Namespace) -> int:
    receipt = interrupt_turn(client_of(arguments), arguments.session, arguments.turn)
    match arguments.format:
        case "json":
            say_json(receipt)
        case "quiet":
            pass
        case _:
            say(as_line(receipt_in_words(receipt)))
    return OK
