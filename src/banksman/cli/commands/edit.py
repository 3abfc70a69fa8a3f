"""`banksman edit`: change the prompt or the priority of an ask that waits in the queue."""

from __future__ import annotations

import argparse

from banksman.cli import OK
from banksman.cli.client.client import segment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform, priority_in


def parser() -> ServerParser:
    flags = ServerParser(
        "edit",
        "SESSION TURN [PROMPT]",
        "Change the prompt or the priority of a waiting ask. With another priority, it is the last "
        "one of that priority.",
        'banksman edit fix-ci t-1f0c "run the tests first" --priority interactive',
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("turn", metavar="TURN", help="id of the turn")
    flags.add_argument("prompt", nargs="?", metavar="PROMPT", help="the new prompt")
    flags.add_argument(
        "--priority", metavar="P", help="interactive, normal, background, or a number"
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_edit, parser().read(words))


def _edit(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}/turns/{segment(arguments.turn)}"
    body = {"prompt": arguments.prompt, "priority": priority_in(arguments)}
    after = client_of(arguments).request("PATCH", path, body=body)
    match arguments.format:
        case "json":
            say_json(after)
        case "quiet":
            pass
        case _:
            say(as_line(f"edited; {len(after['queue'])} queued"))
    return OK
