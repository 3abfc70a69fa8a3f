"""`banksman host`: run a host for a store that many machines share.

This module defines the flags. The host is in `banksman.server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from banksman.cli import USAGE
from banksman.cli.arguments import Parser
from banksman.cli.server_command import add_running, settings_of
from banksman.errors import UsageError

if TYPE_CHECKING:
    from banksman.server.server_settings import ServerSettings

_NOTES = """\
A host has no port: front ends (banksman serve --store nats://…, or any verb with that --store) ask it over the same
servers that keep the log. It takes sessions while it has room and what they need: each label of theirs, and their agent
on its PATH. When it dies, or cannot be heard for as long as the lease (?lease=15), the others take its sessions over,
if the folder of the session is there too.

Settings, and what callers may start here (programs, roots …), are in the [serve] table, as for banksman serve. A
password belongs into a file (?creds=FILE), or into BANKSMAN_SERVE_STORE: what is on a command line everybody sees. TERM
and Ctrl-C: it takes nothing new, each session finishes its turn and goes on elsewhere, and it exits; a second one ends
what runs at once.

exit codes: 0 it was told to go, 1 the machine or the store does not let it, and may do so later, 2 it cannot start
before something is changed: wrong usage or settings, packages that are not installed.
"""


def parser() -> Parser:
    flags = Parser(
        "host",
        "--store nats://HOST[,HOST…] [options]",
        "Take sessions of a store that many machines share.",
        "banksman host --store nats://10.0.0.1,10.0.0.2,10.0.0.3 --label gpu --label repo=x --room 16",
        notes=_NOTES,
    )
    flags.add_argument("--store", metavar="STORE", help="nats://HOST[:PORT][,…][/PREFIX][?SETTING=…], or tls://…")
    add_running(flags, room="how many sessions it takes (64)")
    return flags


def main(words: list[str]) -> int:
    settings = settings_of(parser(), words, who="a host", extra="server,cluster", check=_checked)
    if settings is None:
        return USAGE
    from banksman.server.main import run_host  # noqa: PLC0415

    return run_host(settings)


def _checked(settings: ServerSettings) -> ServerSettings:
    from banksman.server.server_settings import ROOM  # noqa: PLC0415

    if not settings.is_clustered:
        hint = "--store nats://HOST; on one machine, banksman serve needs no host beside it"
        raise UsageError("a host takes sessions of a store that many machines share", hint=hint)
    return settings.with_room(ROOM) if settings.room is None else settings
