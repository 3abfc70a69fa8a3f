"""`banksman upgrade`: continue the running server as another version."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from banksman.cli import OK
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform

_DESCRIPTION = """\
Continue the running server as another version of Banksman. The new version first checks that it can
read the settings and the store, and that it understands what the server hands over. If it does not,
nothing happens, and the reason is printed. Otherwise the server hands over what is running, and
becomes the new version: same process, same port. Install the new version first, for example by
`pip install --upgrade banksman`."""


def parser() -> ServerParser:
    flags = ServerParser(
        "upgrade",
        "[--command COMMAND] [--hold SECONDS]",
        _DESCRIPTION,
        "banksman upgrade --hold 120",
    )
    flags.add_argument(
        "--command",
        metavar="COMMAND",
        help="command of the new version (default: `banksman` on the PATH of the server)",
    )
    flags.add_argument(
        "--hold",
        type=float,
        metavar="SECONDS",
        help="how long the running work waits for the new version (default: hold_seconds)",
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_upgrade, parser().read(words))


def _upgrade(arguments: argparse.Namespace) -> int:
    body: dict[str, Any] = {}
    if arguments.command is not None:
        body["command"] = shlex.split(arguments.command)
    if arguments.hold is not None:
        body["hold_seconds"] = arguments.hold
    client = client_of(arguments, needs_server="an embedded host ends with its verb")
    told = client.post("/v1/upgrade", body)
    match arguments.format:
        case "json":
            say_json(told)
        case "quiet":
            pass
        case _:
            say(f"the server continues as version {as_line(told['version'])}")
    return OK
