"""`banksman close`: close a session and end its agent's processes; --forget deletes its log."""

from __future__ import annotations

import argparse

from banksman.cli import OK
from banksman.cli.client.client import segment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform


def parser() -> ServerParser:
    flags = ServerParser(
        "close",
        "SESSION [--forget]",
        "Close a session, and end the whole process tree of its agent. The session's log is kept.",
        "banksman close fix-ci",
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("--forget", action="store_true", help="also delete the session and its log")
    return flags


def main(words: list[str]) -> int:
    return perform(_close, parser().read(words))


def _close(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}"
    session = client_of(arguments).request(
        "DELETE", path, query={"forget": 1 if arguments.forget else None}
    )
    match arguments.format:
        case "json":
            say_json(session if session is not None else {"forgotten": arguments.session})
        case "quiet":
            pass
        case _:
            say(
                as_line(
                    f"{arguments.session}: {'forgotten' if session is None else session['phase']}"
                )
            )
    return OK
