"""Shared parts of the verbs that talk to a server: flags, session actions, exit codes and failures."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO, cast

from banksman.cli import INTERRUPTED, NO_SERVER, NOT_SAID, REFUSED, USAGE
from banksman.cli.arguments import Parser, add_format
from banksman.cli.client.client import Client, ClientError, NoServer, NotLetIn, Problem, segment
from banksman.cli.client.locate import ServerLocator
from banksman.cli.output import CannotWrite, as_line, close_stdout, say_aside, say_json, speak_any_language
from banksman.errors import BanksmanError, UsageError

if TYPE_CHECKING:
    from banksman.server.server_settings import ServerSettings

BROKEN_PIPE = 128 + signal.SIGPIPE
_NOTES = """\
The server: --url, BANKSMAN_URL or url of the settings; else the one that this user has running, by its socket in the
state folder; else a host inside of this verb, which ends with it: sessions stay in the store, asleep. The store:
--store, BANKSMAN_STORE or the settings; else the state folder's. The token, where a URL needs one: BANKSMAN_TOKEN, the
end of the URL (#token=…), or, for the address that this user's own server announces, the file that it keeps it in.

exit codes: 0 it went well, 1 the turn or command did not, 2 wrong usage, 3 no server or not let in, 4 the server
refused, 5 stdout could not be written (what was asked for may be done), 130 Ctrl-C.
"""


def interrupt_turn(client: Client, session: str, turn: str | None) -> dict[str, Any]:
    """The receipt."""
    place = "" if turn is None else f"/turns/{segment(turn)}"
    return client.post(f"/v1/sessions/{segment(session)}{place}/interrupt")


def receipt_in_words(receipt: dict[str, Any]) -> str:
    queued = len(receipt["queued"])
    rest = f"; {queued} still queued" if queued else ""
    if not receipt["stopped"]:
        return f"not stopped: {str(receipt['by']).replace('_', ' ')}{rest}"
    return f"stopped, by {receipt['by']}{rest}"


# Asking a server to open a session: what `open` and `ask --open` have in common.


def add_cwd(parser: Parser) -> None:
    parser.add_argument("--cwd", metavar="FOLDER", help="where the agent works (this folder, if the server is here)")


def ask_to_open(
    client: Client,
    arguments: argparse.Namespace,
    *,
    agent: str,
    name: str | None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The session. Repeated with the same key if the connection is lost, so that it is opened once. `more`: what else
    it is opened with, as the API has it."""
    body: dict[str, Any] = {"agent": agent, **(more or {})}
    if name is not None:
        body["name"] = name
    if arguments.command:
        body["command"] = arguments.command
    # A server elsewhere knows nothing of where we are.
    if client.place.is_local:
        body["cwd"] = _whole(arguments.cwd or "")
    elif arguments.cwd is not None:
        body["cwd"] = arguments.cwd
    return client.post("/v1/sessions", body, key=uuid.uuid4().hex)


def _whole(folder: str) -> str:
    try:
        return os.path.abspath(folder)
    except FileNotFoundError as exc:
        hint = "cd to another, or --cwd with a whole path"
        raise UsageError("the folder that this is called in is gone", hint=hint) from exc


def body_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of an ask: `prompt`, `priority` and, where the verb has it, `on_busy`."""
    prompt: str | None = arguments.prompt
    body: dict[str, Any] = {"prompt": _on_stdin() if prompt in (None, "-") else prompt}
    if arguments.priority is not None:
        try:
            body["priority"] = int(arguments.priority)
        except ValueError:
            body["priority"] = arguments.priority
    if getattr(arguments, "on_busy", None) is not None:
        body["on_busy"] = arguments.on_busy
    return body


def _on_stdin() -> str:
    stdin = cast("TextIO | None", sys.stdin)
    if stdin is None:
        raise UsageError("the prompt is to be read from stdin, and that is closed")
    try:
        return stdin.buffer.read().decode()
    except UnicodeDecodeError as exc:
        raise UsageError("what is on stdin is not UTF-8") from exc


class ServerParser(Parser):
    """The flags of a verb that asks a server, with those that every such verb has. `in_memory`: a store that ends with
    the verb makes sense for it."""

    def __init__(
        self,
        verb: str,
        usage: str,
        description: str,
        example: str,
        *,
        streams: bool = False,
        in_memory: bool = False,
    ) -> None:
        super().__init__(verb, usage, description, example, notes=_NOTES)
        form = self.add_argument_group("where and how")
        form.add_argument("--url", metavar="URL", help="the server to ask; unix:PATH: by its socket")
        form.add_argument(
            "--store", metavar="STORE", help="sqlite:PATH or nats://HOST, whichever server has it, or none"
        )
        add_format(form, json="one object a line" if streams else "one object", quiet="only what a script would take")
        self.set_defaults(in_memory=in_memory)


def client_of(arguments: argparse.Namespace, *, needs_server: str = "") -> Client:
    """What asks the server, or the host inside, that the flags mean. `needs_server`: why a host inside will not do, as
    the end of a sentence; empty: it will."""
    way: ServerLocator | None = getattr(arguments, "way", None)
    if way is None:
        way = arguments.way = ServerLocator(
            url=arguments.url,
            store=getattr(arguments, "store", None),
            in_memory=getattr(arguments, "in_memory", False),
            needs_server=needs_server,
        )
    return Client(way.place)


Act = Callable[[argparse.Namespace], int]


def perform(act: Act, arguments: argparse.Namespace) -> int:
    """Do it, and turn whatever goes wrong into one line and an exit code. A host inside has ended when it returns."""
    speak_any_language()
    is_json: bool = arguments.format == "json"
    try:
        code = act(arguments)
        _end(arguments, at_once=False)
        return code
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
    finally:
        _end(arguments, at_once=True)


def _end(arguments: argparse.Namespace, *, at_once: bool) -> None:
    way: ServerLocator | None = getattr(arguments, "way", None)
    if way is None or not way.is_embedded:
        return
    if at_once:
        # To stop what runs is the quickest that there is, and has its own deadlines. Whoever tells us to end once more
        # would only leave the socket behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    way.end(at_once=at_once)


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
        case UsageError():
            return USAGE
        case _:
            # What a server would have answered: the store cannot be opened, the machine has no room.
            return REFUSED


def add_running(flags: Parser, *, room: str) -> None:
    """`room`: what it means for this one. None is "not given", so that the file is heard: no flag has a default."""
    add = flags.add_argument
    add("--name", metavar="NAME", help="what it is called (the name of the machine)")
    add("--label", action="append", dest="labels", metavar="LABEL", help="what sessions may need of it")
    add("--room", type=int, metavar="N", help=room)
    add("--config", metavar="PATH", help="the TOML file to read instead of the user's")
    add("--log-format", choices=("text", "json"), help="how log lines are written (text)")
    add("--log-level", choices=("debug", "info", "warning", "error"), help="what is worth one (info)")


def settings_of(
    flags: Parser,
    words: list[str],
    *,
    who: str,
    extra: str,
    check: Callable[[ServerSettings], ServerSettings] | None = None,
) -> ServerSettings | None:
    """None: it cannot begin, and was told why. `check` may refuse (`UsageError`), or put in what is usual here."""
    arguments = vars(flags.parse_args(words))
    path: str | None = arguments.pop("config")
    try:
        # With all that it needs: the first package that is not there is named.
        import_module("banksman.server.main")
        from banksman.server.server_settings import load  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("banksman"):
            raise
        say_aside(f"banksman: {who} needs {exc.name}, which is not installed (pip install 'banksman[{extra}]')")
        return None
    try:
        settings = load(path, arguments)
        return settings if check is None else check(settings)
    except UsageError as exc:
        say_aside(f"banksman: {as_line(exc)}")
        return None
