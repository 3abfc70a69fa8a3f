"""`banksman bundle`: write an archive for a bug report about a session."""

from __future__ import annotations

import argparse

from banksman.cli.client.client import segment
from banksman.cli.download import download, say_written
from banksman.cli.server_command import ServerParser, client_of, perform

_DESCRIPTION = """\
Write a zip archive for a bug report: the frames and events of a session, its state, the versions,
the settings without secrets, the findings of `doctor`, stacks, metrics, and what the agent has
written to stderr. Configured secrets, strings that look like keys, e-mail addresses and the names
of users in paths are removed. No pattern knows every key: read the archive before you give it
away."""


def parser() -> ServerParser:
    flags = ServerParser(
        "bundle",
        "SESSION FILE|- [--no-text]",
        _DESCRIPTION,
        "banksman bundle fix-ci report.zip --no-text",
        only_reads=True,
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("file", metavar="FILE", help="path of the new file; - for stdout")
    flags.add_argument(
        "--no-text",
        action="store_true",
        help="mask the words of the conversation; leave out stderr and metrics",
    )
    return flags


def main(words: list[str]) -> int:
    return perform(_bundle, parser().read(words))


def _bundle(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}/bundle"
    query = {"text": "false"} if arguments.no_text else None
    return say_written(arguments, download(client_of(arguments), path, arguments.file, query))
