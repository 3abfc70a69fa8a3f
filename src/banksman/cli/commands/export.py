"""`banksman export`: write the whole log of a session to a file, for `Host.import_session`."""

from __future__ import annotations

import argparse

from banksman.cli.client.client import segment
from banksman.cli.download import download, say_written
from banksman.cli.server_command import ServerParser, client_of, perform


def parser() -> ServerParser:
    flags = ServerParser(
        "export",
        "SESSION FILE|-",
        "Write the whole log of a session to a new file, one JSON object per line. "
        "`Host.import_session` reads it. It has the conversation in full; configured secrets "
        "were removed before they were stored. Its last line has a hash of the others.",
        "banksman export fix-ci fix-ci.ndjson",
        only_reads=True,
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("file", metavar="FILE", help="path of the new file; - for stdout")
    return flags


def main(words: list[str]) -> int:
    return perform(_export, parser().read(words))


def _export(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}/export"
    size = download(client_of(arguments), path, arguments.file)
    return say_written(arguments, size)
