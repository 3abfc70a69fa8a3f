"""`banksman open`: open a session with an agent and print its id."""

from __future__ import annotations

import argparse

from banksman.cli import OK
from banksman.cli.arguments import split_command
from banksman.cli.containment_flags import add_containment
from banksman.cli.output import as_line, say, say_json
from banksman.cli.server_command import (
    ServerParser,
    add_budget,
    add_cwd,
    add_fallback,
    add_on_limit,
    ask_to_open,
    client_of,
    perform,
)

_DESCRIPTION = """\
Open a session with an agent, or return the existing session with this name. COMMAND replaces
the agent's command."""


def parser() -> ServerParser:
    flags = ServerParser(
        "open",
        "AGENT [--name NAME] [--cwd FOLDER] [--label LABEL]… [options] [-- COMMAND …]",
        _DESCRIPTION,
        "banksman open claude --name fix-ci",
    )
    flags.add_argument(
        "agent", metavar="AGENT", help="an agent that the server knows, such as claude"
    )
    flags.add_argument("--name", metavar="NAME", help="name to use instead of the session's id")
    add_cwd(flags)
    add_budget(flags)
    flags.add_argument(
        "--label",
        action="append",
        metavar="LABEL",
        help="in a cluster, label that the host must have (see banksman hosts); may be repeated; "
        "a server on one machine ignores it",
    )
    add_on_limit(flags)
    add_fallback(flags)
    add_containment(flags)
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    before, command = split_command(words)
    arguments = flags.read(before)
    arguments.command = command
    if command == []:
        flags.error("no command after --")
    return perform(_open, arguments)


def _open(arguments: argparse.Namespace) -> int:
    wanted = {"labels": arguments.label, "on_limit": arguments.on_limit}
    more = {name: value for name, value in wanted.items() if value}
    session = ask_to_open(
        client_of(arguments), arguments, agent=arguments.agent, name=arguments.name, more=more
    )
    if arguments.format == "json":
        say_json(session)
    else:
        # Text mode prints only the id, because scripts use `session=$(banksman open claude)`.
        say(as_line(session["id"]))
    return OK
