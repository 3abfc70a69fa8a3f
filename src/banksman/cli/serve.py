"""`banksman serve`: the server. What it does is in `banksman.serve`; here are its flags."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from banksman.cli.terminal import as_line, say_aside
from banksman.cli.verb import USAGE
from banksman.errors import UsageError

_EPILOG = """\
Everything that can be set is in the [serve] table of a TOML file, by default banksman/config.toml in the user's
configuration folder; flags come before it. The server prints its URL. TERM and Ctrl-C: it takes nothing new, finishes
what runs, and exits; a second one ends what runs at once. USR1: it writes where every task stands to stderr.

exit codes: 0 it was told to go, 1 the machine does not let it, and may do so later (a port that is taken, a disk that
is full), 2 it cannot start before something is changed: wrong usage or settings, packages that are not installed.

example:
  banksman serve --port 4380 --store sqlite:/var/lib/banksman/log.db
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say_aside(f"{self.prog}: {as_line(message)}")
        sys.exit(USAGE)


def serve(words: list[str]) -> int:
    parser = _Parser(
        prog="banksman serve",
        usage="banksman serve [options]",
        description="Serve sessions and commands over HTTP, on this machine only unless told otherwise.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    # None is "not given", so that the file is heard: a flag has no default of its own here.
    add("--bind", metavar="ADDRESS", help="the address to listen on (127.0.0.1)")
    add("--port", type=int, metavar="PORT", help="the port (4380); 0: any that is free")
    add("--store", metavar="STORE", help="sqlite:PATH or memory: (a file in the user's state folder)")
    add("--token-file", metavar="PATH", help="where the token is; made at the first start, mode 0600")
    add("--token", metavar="TOKEN", help="the token itself; everybody on this machine can read it there")
    add("--config", metavar="PATH", help="the TOML file to read instead of the user's")
    add("--allow-remote", action="store_true", default=None, help="allow an address that other machines can reach")
    add("--log-format", choices=("text", "json"), help="how log lines are written (text)")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="what is worth one (info)")
    arguments = vars(parser.parse_args(words))
    path: str | None = arguments.pop("config")
    try:
        from banksman.serve.main import run  # noqa: PLC0415
        from banksman.serve.settings import load  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        say_aside(f"banksman: the server needs {exc.name}, which is not installed (pip install 'banksman[server]')")
        return USAGE
    try:
        settings = load(path, arguments)
    except UsageError as exc:
        say_aside(f"banksman: {as_line(exc)}")
        return USAGE
    return run(settings)
