"""`banksman serve`: run the HTTP server for sessions and commands.

This module defines the flags. The server is in `banksman.server`.
"""

from __future__ import annotations

import argparse

from banksman.cli import USAGE
from banksman.cli.arguments import Parser
from banksman.cli.server_flags import add_running, settings_of

_NOTES = """\
All settings are in the [serve] table of a TOML file, by default banksman/config.toml in the user's
configuration folder. Environment variables (BANKSMAN_SERVE_PORT …) override the file, and flags
override both. `banksman config init` writes such a file, and `banksman config show` prints the
settings in effect. The server prints its URL. On TERM or Ctrl-C it accepts nothing new, finishes
what is running, and exits; a second signal ends what is running at once. With --hand-over, TERM
keeps what is running for the next server of the same store, and a second signal changes nothing.
On USR1 it writes the stack of every task to stderr.

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
    add(
        "--tls-cert",
        metavar="PATH",
        help="certificate chain (PEM): serve https; a changed file is used without a restart",
    )
    add("--tls-key", metavar="PATH", help="unencrypted key of the certificate (PEM)")
    add(
        "--hand-over",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="on TERM, keep what runs for the next server (default: under a service manager)",
    )
    add(
        "--hold-seconds",
        type=float,
        metavar="S",
        help="seconds that the next server has to take over (default: 60)",
    )
    add(
        "--survive",
        choices=("crash",),
        help="let agents survive a server that is killed, for the next one (default: they end)",
    )
    add(
        "--check",
        action="store_true",
        default=None,
        help="check that this version can take over, as `banksman upgrade` does, and exit",
    )
    add_running(
        flags, room="maximum number of sessions of a shared store on this server (default: 0)"
    )
    return flags


def main(words: list[str]) -> int:
    is_check = "--check" in words
    given = [word for word in words if word != "--check"]
    settings = settings_of(parser(), given, who="the server", extra="server")
    if settings is None:
        return USAGE
    if is_check:
        from banksman.server.main import check  # noqa: PLC0415
        from banksman.store.sqlite.store_health import check_schema  # noqa: PLC0415

        return check(settings, check_schema)
    from banksman.server.main import run  # noqa: PLC0415

    return run(settings, words=["serve", *words])
