"""`banksman drain`: let the server or a host finish its work and exit."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from banksman.cli import OK
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.session_table import Shown


def parser() -> ServerParser:
    flags = ServerParser(
        "drain",
        "[HOST] [--timeout SECONDS]",
        "Tell the server to take nothing new, finish what runs, and exit. Or tell a host, by its name or id, to let\n"
        "its sessions go on elsewhere, and exit: before an upgrade, say. Where no other host can take them, they wait\n"
        "until one can. banksman hosts shows who is there, and what is left on it.",
        "banksman drain build-1 --timeout 60",
    )
    flags.add_argument("host", nargs="?", metavar="HOST", help="a host of a shared store (the server itself)")
    flags.add_argument("--timeout", type=float, metavar="SECONDS", help="then end what still runs")
    return flags


def main(words: list[str]) -> int:
    return perform(_drain, parser().read(words))


def _drain(arguments: argparse.Namespace) -> int:
    body = {} if arguments.timeout is None else {"timeout": arguments.timeout}
    if arguments.host is None:
        client = client_of(arguments, needs_server="a host inside of a verb ends with its verb")
        told = client.post("/v1/drain", body)
        done = "the server takes nothing new, finishes what runs, and exits"
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
    wait = "until another host can take them, with all that was asked in them"
    if not sessions:
        return f"{host} takes nothing new, and exits: it has no sessions"
    if waiting == sessions:
        none = f"No other host can take its sessions now: {sessions} wait {wait}"
        return f"{host} takes nothing new, finishes what runs, and exits. {none}"
    if waiting:
        some = f"{sessions - waiting} of its sessions go on elsewhere ({names}), {waiting} wait {wait}"
        return f"{host} takes nothing new, {some}, and it exits"
    return f"{host} takes nothing new, its sessions go on elsewhere ({names}), and it exits"
