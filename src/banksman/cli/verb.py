"""What all verbs that talk to a server share: their flags, their exit codes, and how they fail."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from banksman.cli import INTERRUPTED
from banksman.cli.client import Client, ClientError, NoServer, NotLetIn, Problem
from banksman.cli.finding import find
from banksman.cli.terminal import CannotWrite, as_line, close_stdout, say_aside, say_json, speak_any_language
from banksman.errors import BanksmanError

OK, NOT_DONE, USAGE, NO_SERVER, REFUSED, NOT_SAID = 0, 1, 2, 3, 4, 5
BROKEN_PIPE = 128 + signal.SIGPIPE

_EPILOG = """\
The server: --url, BANKSMAN_URL, the one that was started here, or http://127.0.0.1:4380. The token: BANKSMAN_TOKEN, the
end of a URL such as the server prints (#token=…), or the file that the server keeps it in.

exit codes: 0 it went well, 1 the turn or command did not, 2 wrong usage, 3 no server or not let in, 4 the server
refused, 5 stdout could not be written (what was asked for may be done), 130 Ctrl-C.

example:
  {example}
"""


class Parser(argparse.ArgumentParser):
    """The flags of one verb, with those that every verb has."""

    def __init__(self, verb: str, usage: str, description: str, example: str, *, streams: bool = False) -> None:
        super().__init__(
            prog=f"banksman {verb}",
            usage=f"banksman {verb} {usage}",
            description=description,
            epilog=_EPILOG.format(example=example),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        form = self.add_argument_group("where and how")
        form.add_argument("--url", metavar="URL", help="the server to ask")
        form.add_argument(
            "--format",
            choices=("text", "json", "quiet"),
            default="text",
            help="text for people (the default); json: " + ("one object a line" if streams else "one object") + "; "
            "quiet: only what a script would take",
        )
        form.add_argument("--json", dest="format", action="store_const", const="json", help="short for --format json")

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say_aside(f"{self.prog}: {as_line(message)}")
        sys.exit(USAGE)

    def read(self, words: list[str]) -> argparse.Namespace:
        """Flags and words in any order."""
        return self.parse_intermixed_args(words)


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """What is before `--`, and the command after it; None: there is no `--`."""
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def client_of(arguments: argparse.Namespace) -> Client:
    url: str | None = arguments.url
    return Client(lambda: find(url))


Act = Callable[[argparse.Namespace], int]


def perform(act: Act, arguments: argparse.Namespace) -> int:
    """Do it, and turn whatever goes wrong into one line and an exit code."""
    speak_any_language()
    is_json: bool = arguments.format == "json"
    try:
        return act(arguments)
    except BrokenPipeError:
        # Whoever read us has enough (`| head -1`): that is an end, and nothing to complain of.
        close_stdout()
        return BROKEN_PIPE
    except BanksmanError as exc:
        return _failed(exc, is_json=is_json)
    except KeyboardInterrupt:
        # Whoever presses it again while we leave shall not see a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED


def _failed(error: BanksmanError, *, is_json: bool) -> int:
    say_aside(f"banksman: {as_line(error)}")
    if isinstance(error, CannotWrite):
        close_stdout()
        return NOT_SAID
    if is_json:
        told = {"error": type(error).__name__, "message": error.args[0], "hint": error.hint}
        if isinstance(error, Problem):
            told |= {"error": error.title, "status": error.status, "ids": error.ids}
        try:
            say_json(told)
        except (BrokenPipeError, CannotWrite):
            close_stdout()
    match error:
        case NoServer() | NotLetIn():
            return NO_SERVER
        case ClientError():
            return REFUSED
        case _:
            return USAGE
