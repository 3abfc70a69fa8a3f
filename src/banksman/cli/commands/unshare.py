"""`banksman unshare`: share a session with these callers no longer."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from banksman.cli.commands.share import change
from banksman.cli.server_command import ServerParser, perform


def parser() -> ServerParser:
    flags = ServerParser(
        "unshare",
        "SESSION CALLER…",
        "Share a session with these callers no longer. Their open streams of it end.",
        "banksman unshare fix-ci bob",
    )
    flags.add_argument("session", metavar="SESSION", help="id or name of the session")
    flags.add_argument("callers", nargs="+", metavar="CALLER", help="name of a token")
    return flags


def main(words: list[str]) -> int:
    return perform(_unshare, parser().read(words))


def _unshare(arguments: argparse.Namespace) -> int:
    def rest(present: Collection[str]) -> Collection[str]:
        return set(present).difference(arguments.callers)

    return change(arguments, rest)
