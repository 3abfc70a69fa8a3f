"""`banksman host`: a host of a store that many machines share. Here are its flags; the rest is `banksman.serve`."""

from __future__ import annotations

from banksman.cli import USAGE
from banksman.cli.parsing import Parser
from banksman.cli.saying.terminal import as_line, say_aside
from banksman.errors import UsageError

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
    add = flags.add_argument
    # None is "not given", so that the file is heard: a flag has no default of its own here.
    add("--store", metavar="STORE", help="nats://HOST[:PORT][,…][/PREFIX][?SETTING=…], or tls://…")
    add_membership(flags)
    add("--config", metavar="PATH", help="the TOML file to read instead of the user's")
    add("--log-format", choices=("text", "json"), help="how log lines are written (text)")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="what is worth one (info)")
    return flags


def add_membership(flags: Parser, *, room: str = "how many sessions it takes (64)") -> None:
    """What a server has, too, where its store is shared."""
    flags.add_argument("--name", metavar="NAME", help="what it is called (the name of the machine)")
    flags.add_argument("--label", action="append", dest="labels", metavar="LABEL", help="what sessions may need of it")
    flags.add_argument("--room", type=int, metavar="N", help=room)


def main(words: list[str]) -> int:
    arguments = vars(parser().parse_args(words))
    path: str | None = arguments.pop("config")
    try:
        from banksman.serve.main import run_host  # noqa: PLC0415
        from banksman.serve.settings import ROOM, Settings, load  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        say_aside(f"banksman: a host needs {exc.name}, which is not installed (pip install 'banksman[server,cluster]')")
        return USAGE
    try:
        settings: Settings = load(path, arguments)
        if not settings.is_clustered:
            hint = "--store nats://HOST; on one machine, banksman serve needs no host beside it"
            raise UsageError("a host takes sessions of a store that many machines share", hint=hint)
        if settings.room is None:
            settings = settings.with_room(ROOM)
    except UsageError as exc:
        say_aside(f"banksman: {as_line(exc)}")
        return USAGE
    return run_host(settings)
