"""`banksman host`: run a host for a store that many machines share.

This module defines the flags. The host is in `banksman.server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from banksman.cli import USAGE
from banksman.cli.arguments import Parser
from banksman.cli.server_flags import add_running, settings_of
from banksman.errors import UsageError

if TYPE_CHECKING:
    from banksman.server.server_settings import ServerSettings

_NOTES = """\
A host has no port. Front ends (banksman serve --store nats://…, or any verb with that --store) reach
it through the NATS servers that keep the log. A host takes a session if it has room, all labels of
the session, and the agent on its PATH. If the host dies, or is unreachable for longer than its lease
(?lease=15), other hosts take its sessions over, if the folder of the session exists there.

Settings, and the programs and folders that callers may use (programs, roots …), are in the [serve]
table, as for banksman serve. Put a password in a file (?creds=FILE) or in BANKSMAN_SERVE_STORE: all
users of the machine can read a command line. On TERM or Ctrl-C, the host accepts nothing new, each
session finishes its turn and continues on another host, and the host exits. A second signal ends
running turns at once.

exit codes: 0 stopped on request, 1 a failure of the machine or the store that may pass, 2 cannot
start until something is changed: wrong usage or settings, missing packages.
"""  # noqa: E501


def parser() -> Parser:
    flags = Parser(
        "host",
        "--store nats://HOST[,HOST…] [options]",
        "Run sessions of a store that many machines share.",
        "banksman host --store nats://10.0.0.1,10.0.0.2,10.0.0.3 "
        "--label gpu --label repo=x --room 16",
        notes=_NOTES,
    )
    flags.add_argument(
        "--store", metavar="STORE", help="nats://HOST[:PORT][,…][/PREFIX][?SETTING=…], or tls://…"
    )
    add_running(flags, room="maximum number of sessions (default: 64)")
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
        hint = "pass --store nats://HOST; on one machine, `banksman serve` needs no host"
        raise UsageError(
            "cannot start a host: it needs a store that many machines share", hint=hint
        )
    return settings.with_room(ROOM) if settings.room is None else settings
