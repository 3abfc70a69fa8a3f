"""`banksman hold`: reserve a session for several asks in a row, or release it.

The hold is not tied to this process. The server ends it when no ask has come for a minute.
"""

from __future__ import annotations

import argparse
import uuid

from banksman.cli import OK
from banksman.cli.client.client import Client, segment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import (
    ServerParser,
    add_caller,
    client_of,
    perform,
    priority_in,
)

# One request waits for this long at most. A grant is reported at once.
WAIT_SECONDS = 30


def parser() -> ServerParser:
    flags = ServerParser(
        "hold",
        "SESSION [--priority P] [--no-wait] | SESSION --release ID",
        "Reserve a session for several asks in a row: print the id of the hold when it is granted, "
        "for `ask --hold`. Other asks of its priority or below wait. The hold ends with "
        "--release, or after a minute without an ask of it.",
        "banksman hold fix-ci --priority interactive",
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument(
        "--priority", metavar="P", help="interactive, normal, background, or a number"
    )
    flags.add_argument(
        "--no-wait", action="store_true", help="do not wait until the hold is granted"
    )
    flags.add_argument("--release", metavar="ID", help="release this hold")
    add_caller(flags)
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if arguments.release is not None and (arguments.priority is not None or arguments.no_wait):
        flags.error("--release takes neither --priority nor --no-wait")
    return perform(_hold, arguments)


def _hold(arguments: argparse.Namespace) -> int:
    client = client_of(arguments, needs_server="a hold of an embedded host would end with it")
    path = f"/v1/sessions/{segment(arguments.session)}/holds"
    if arguments.release is not None:
        client.request("DELETE", f"{path}/{segment(arguments.release)}")
        if arguments.format == "text":
            say(as_line(f"released {arguments.release}"))
        return OK
    body = {
        name: value
        for name, value in (("priority", priority_in(arguments)), ("caller", arguments.caller))
        if value is not None
    }
    hold = client.post(path, body, key=uuid.uuid4().hex)
    if not arguments.no_wait:
        hold = _granted(client, path, hold)
    match arguments.format:
        case "json":
            say_json(hold)
        case _:
            say(as_line(hold["hold"]))
    return OK


def _granted(client: Client, path: str, hold: dict[str, object]) -> dict[str, object]:
    """Wait until the hold is granted, and return it. Ctrl-C withdraws it."""
    place = f"{path}/{segment(str(hold['hold']))}"
    try:
        while hold["at"] is None:
            hold = client.get(place, {"wait": WAIT_SECONDS})
    except KeyboardInterrupt:
        client.request("DELETE", place)
        raise
    return hold
