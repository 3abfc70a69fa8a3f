"""`banksman page`: print a link that opens the server's page in a browser and logs it in."""

from __future__ import annotations

import argparse

from banksman.cli import OK
from banksman.cli.output import say, say_json
from banksman.cli.server_command import ServerParser, client_of, perform

_DESCRIPTION = """\
Print a link that logs a browser in to the server's web page. The link works once, within ten
minutes. The browser stays logged in. Each further browser needs another link."""


def parser() -> ServerParser:
    return ServerParser(
        "page",
        "[options]",
        _DESCRIPTION,
        "banksman page",
    )


def main(words: list[str]) -> int:
    return perform(_page, parser().read(words))


def _page(arguments: argparse.Namespace) -> int:
    client = client_of(arguments, needs_server="an embedded host has no web page")
    told = client.post("/v1/login/code")
    # If the user named the server by its URL, the link uses that URL: there may be a proxy between
    # the browser and the server.
    address = told["url"] if client.place.socket is not None else client.place.url
    link = f"{address}/#code={told['code']}"
    if arguments.format == "json":
        say_json({"link": link, "seconds": told["seconds"]})
    else:
        say(link)
    return OK
