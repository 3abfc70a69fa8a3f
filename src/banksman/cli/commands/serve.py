"""`banksman serve`: run the HTTP server for sessions and commands.

This module defines the flags. The server is in `banksman.server`.
"""

from __future__ import annotations

from banksman.cli import USAGE
from banksman.cli.arguments import Parser
from banksman.cli.server_command import add_running, settings_of

_NOTES = """\
Everything that can be set is in the [serve] table of a TOML file, by default banksman/config.toml in the user's
configuration folder; variables (BANKSMAN_SERVE_PORT …) come before it, and flags before those. banksman config init
writes such a file, banksman config show says what holds. The server prints its URL. TERM and Ctrl-C: it takes nothing
new, finishes what runs, and exits; a second one ends what runs at once. USR1: it writes where every task stands to
stderr.

With a store that many machines share (nats://…) it is a front end: sessions are with the hosts (banksman host), and it
asks those. With --room it is a host, too.

exit codes: 0 it was told to go, 1 the machine does not let it, and may do so later (a port that is taken, a disk that
is full), 2 it cannot start before something is changed: wrong usage or settings, packages that are not installed.
"""


def parser() -> Parser:
    flags = Parser(
        "serve",
        "[options]",
        "Serve sessions and commands over HTTP, on this machine only unless told otherwise.",
        "banksman serve --port 4380 --store sqlite:/var/lib/banksman/log.db",
        notes=_NOTES,
    )
    add = flags.add_argument
    add("--bind", metavar="ADDRESS", help="the address to listen on (127.0.0.1)")
    add("--port", type=int, metavar="PORT", help="the port (4380); 0: any that is free")
    add("--store", metavar="STORE", help="sqlite:PATH, memory: or nats://HOST (a file in the user's state folder)")
    add("--token-file", metavar="PATH", help="where the token is; made at the first start, mode 0600")
    add("--token", metavar="TOKEN", help="the token itself; everybody on this machine can read it there")
    add("--allow-remote", action="store_true", default=None, help="allow an address that other machines can reach")
    add_running(flags, room="how many sessions of a shared store it takes itself (0)")
    return flags


def main(words: list[str]) -> int:
    settings = settings_of(parser(), words, who="the server", extra="server")
    if settings is None:
        return USAGE
    from banksman.server.main import run  # noqa: PLC0415

    return run(settings)
