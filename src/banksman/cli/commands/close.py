"""`banksman close`: close a session and end its agent's processes."""

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
        "Close a session: its agent's whole tree is ended. What was said is kept.",
        "banksman close fix-ci",
    )
    flags.add_argument("session", metavar="SESSION", help="its id or its name")
    flags.add_argument("--forget", action="store_true", help="and delete what was said in it, for good")
    return flags


def main(words: list[str]) -> int:
    return perform(_close, parser().read(words))


def _close(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}"
    session = client_of(arguments).request("DELETE", path, query={"forget": 1 if arguments.forget else None})
    match arguments.format:
        case "json":
            say_json(session if session is not None else {"forgotten": arguments.session})
        case "quiet":
            pass
        case _:
            say(as_line(f"{arguments.session}: {'forgotten' if session is None else session['phase']}"))
    return OK
