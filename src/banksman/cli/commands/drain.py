"""`banksman drain`: let the server or a host finish its work and exit."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from banksman.cli import OK
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.session_table import Shown
from banksman.errors import UsageError

_DESCRIPTION = """\
Let the server accept nothing new, finish what is running, and exit. With HOST, let that host of
a shared store exit, for example before an upgrade: its sessions continue on other hosts.
Sessions that no other host can take wait until one can. `banksman hosts` lists the hosts and
the number of sessions on each.

With --hand-over, what is running is not finished: it waits for the next server of the same store,
which continues it. Without a next server it is ended after the hold."""


def parser() -> ServerParser:
    flags = ServerParser(
        "drain",
        "[HOST] [--timeout SECONDS] [--hand-over [--hold SECONDS]]",
        _DESCRIPTION,
        "banksman drain build-1 --timeout 60",
    )
    flags.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="name or id of a host of a shared store (default: the server itself)",
    )
    flags.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end what is still running after this time"
    )
    flags.add_argument(
        "--hand-over", action="store_true", help="keep what is running for the next server"
    )
    flags.add_argument(
        "--hold",
        type=float,
        metavar="SECONDS",
        help="how long it waits for the next server (default: hold_seconds of the settings)",
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_drain, parser().read(words))


def _drain(arguments: argparse.Namespace) -> int:
    body: dict[str, Any] = {} if arguments.timeout is None else {"timeout": arguments.timeout}
    if arguments.hold is not None and not arguments.hand_over:
        raise UsageError("cannot use --hold alone", hint="add --hand-over")
    if arguments.hand_over and arguments.host is not None:
        raise UsageError("cannot hand over a host of a cluster", hint="leave out --hand-over")
    if arguments.hand_over:
        body["hand_over"] = True
        if arguments.hold is not None:
            body["hold_seconds"] = arguments.hold
    if arguments.host is None:
        client = client_of(arguments, needs_server="an embedded host ends with its verb")
        told = client.post("/v1/drain", body)
        work = "hands over" if arguments.hand_over else "finishes"
        done = f"the server accepts nothing new, {work} what is running, and exits"
    else:
        told = client_of(arguments).post(f"/v1/hosts/{quote(arguments.host, safe='')}/drain", body)
        done = outlook(as_line(arguments.host), told)
    match arguments.format:
        case "json":
            say_json(told)
        case "quiet":
            pass
        case _:
            say(done)
    return OK


def outlook(host: str, told: Shown) -> str:
    """Describe where the sessions of a draining host continue, and how many have to wait."""
    sessions, waiting = told["sessions"], told["waiting"]
    names = as_line(", ".join(told["hosts"]))
    wait = "until another host can take them, with their queued asks"
    if not sessions:
        return f"{host} accepts nothing new, and exits: it has no sessions"
    if waiting == sessions:
        none = f"No other host can take its sessions now: {sessions} wait {wait}"
        return f"{host} accepts nothing new, finishes what is running, and exits. {none}"
    if waiting:
        some = (
            f"{sessions - waiting} of its sessions continue on other hosts ({names}), "
            f"{waiting} wait {wait}"
        )
        return f"{host} accepts nothing new, and exits: {some}"
    return f"{host} accepts nothing new, and exits: its sessions continue on other hosts ({names})"
