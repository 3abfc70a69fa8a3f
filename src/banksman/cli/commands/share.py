"""`banksman share`: share a session with other callers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from banksman.cli import OK
from banksman.cli.client.client import segment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform


def parser() -> ServerParser:
    flags = ServerParser(
        "share",
        "SESSION [CALLER…]",
        "Share a session with these callers too. Without a caller, show its owner, and whom it is "
        "shared with.",
        "banksman share fix-ci alice bob",
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("callers", nargs="*", metavar="CALLER", help="name of a token")
    return flags


def main(words: list[str]) -> int:
    return perform(_share, parser().read(words))


def _share(arguments: argparse.Namespace) -> int:
    return change(arguments, set(arguments.callers).union)


def change(
    arguments: argparse.Namespace, after: Callable[[Collection[str]], Collection[str]]
) -> int:
    """Share the session with `after` of the present callers, and print the result."""
    client = client_of(arguments)
    path = f"/v1/sessions/{segment(arguments.session)}/shared"
    found: dict[str, Any] = client.get(path)
    wanted = sorted(after(found["shared"]))
    if wanted != found["shared"]:
        found = client.request("PUT", path, body={"shared": wanted})
    match arguments.format:
        case "json":
            say_json(found)
        case "quiet":
            pass
        case _:
            say(as_line(f"owner: {found['owner'] or '-'}"))
            say(as_line(f"shared: {', '.join(found['shared']) or '-'}"))
    return OK
