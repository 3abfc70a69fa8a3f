"""`banksman serve`: run the HTTP server for sessions and commands.

This module defines the flags. The server is in `banksman.server`.
"""

from __future__ import annotations

from banksman.cli import USAGE
from banksman.cli.arguments import Parser
from banksman.cli.server_command import add_running, settings_of

_NOTES = """\
All settings are in the [serve] table of a TOML file, by default banksman/config.toml in the user's
configuration folder. Environment variables (BANKSMAN_SERVE_PORT …) override the file, and flags
override both. `banksman config init` writes such a file, and `banksman config show` prints the
settings in effect. The server prints its URL. On TERM or Ctrl-C it accepts nothing new, finishes
what is running, and exits; a second signal ends what is running at once. On USR1 it writes the stack
of every task to stderr.

With a store that many machines share (nats://…) the server is a front end: hosts (banksman host) run
the sessions, and the server forwards to them. With --room it is a host, too.

exit codes: 0 stopped on request, 1 a failure of the machine that may pass (the port is in use, the
disk is full), 2 cannot start until something is changed: wrong usage or settings, missing packages.
"""  # noqa: E501


def parser() -> Parser:
    flags = Parser(
        "serve",
        "[options]",
        "Serve sessions and commands over HTTP, by default on this machine only.",
        "banksman serve --port 4380 --store sqlite:/var/lib/banksman/log.db",
        notes=_NOTES,
    )
    add = flags.add_argument
    add("--bind", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add(
        "--port",
        type=int,
        metavar="PORT",
        help="port to listen on (default: 4380); 0 for any free port",
    )
    add(
        "--store",
        metavar="STORE",
        help="sqlite:PATH, memory: or nats://HOST (default: a file in the user's state folder)",
    )
    add(
        "--token-file",
        metavar="PATH",
        help="file of the token; created at the first start with mode 0600",
    )
    add(
        "--token",
        metavar="TOKEN",
        help="the token; all users of this machine can read it on the command line",
    )
    add(
        "--allow-remote",
        action="store_true",
        default=None,
        help="allow an address that other machines can reach",
    )
    add_running(
        flags, room="maximum number of sessions of a shared store on this server (default: 0)"
    )
    return flags


def main(words: list[str]) -> int:
    settings = settings_of(parser(), words, who="the server", extra="server")
    if settings is None:
        return USAGE
    from banksman.server.main import run  # noqa: PLC0415

    return run(settings)
