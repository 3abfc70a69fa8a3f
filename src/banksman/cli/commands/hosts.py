"""`banksman hosts`: list the hosts that share the store. Read-only.

This is a separate verb and not a flag of `ps`: `ps` lists the work, `hosts` lists where work can
run.
"""

from __future__ import annotations

import argparse
import time

from banksman.cli import OK
from banksman.cli.output import as_line, say, say_json, table
from banksman.cli.server_command import ServerParser, client_of, perform
from banksman.cli.tui.screen import seconds_in_words
from banksman.cli.tui.session_table import Shown

_DESCRIPTION = """\
List the hosts that share the store, with their labels, agents and free room. A host whose lease
has expired is not listed: other hosts take its sessions over. A front end has no room, and
forwards to the other hosts. A program runs the sessions that it opened, and takes no others."""


def parser() -> ServerParser:
    return ServerParser(
        "hosts",
        "",
        _DESCRIPTION,
        "banksman hosts --store nats://10.0.0.1",
    )


def main(words: list[str]) -> int:
    return perform(_hosts, parser().read(words))


def _hosts(arguments: argparse.Namespace) -> int:
    hosts: list[Shown] = client_of(arguments).get("/v1/hosts")["hosts"]
    match arguments.format:
        case "json":
            say_json({"hosts": hosts})
        case "quiet":
            for host in hosts:
                say(as_line(host["id"]))
        case _ if not hosts:
            say("only this machine uses the store; pass --store nats://… for a shared one")
        case _:
            head = ("NAME", "HOST", "STATE", "USED", "ROOM", "LABELS", "AGENTS", "VERSION", "UP")
            table(head, [_row(host) for host in hosts])
    return OK


def _row(host: Shown) -> tuple[object, ...]:
    return (
        as_line(host["name"]),
        as_line(host["id"]),
        _state(host),
        host["used"],
        host["room"],
        as_line(" ".join(host["labels"]) or "-"),
        as_line(" ".join(host["agents"]) or "-"),
        as_line(host["version"]),
        seconds_in_words(max(0.0, time.time() - host["since"])),
    )


def _state(host: Shown) -> str:
    if host.get("silent"):
        return "silent"
    if host["draining"]:
        return "draining"
    if not host["room"]:
        # A program has sessions but takes no others. A server of an older release does not send
        # this field.
        return "front" if host.get("front", True) else "program"
    return "full" if host["used"] >= host["room"] else "up"
