"""Shared parts of the verbs: errors to exit codes, opening and interrupting.

- `perform` runs a verb and turns each failure into a message and an exit code. The verbs without a
  server use it, too.
- `ServerParser` and `client_of` are for the verbs that talk to a server, or to an embedded host.

`server_flags.py` has the flags of the verbs that run a server.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from banksman import config
from banksman.cli import INTERRUPTED, NO_SERVER, NOT_SAID, REFUSED, USAGE
from banksman.cli.arguments import Parser, add_format
from banksman.cli.client.client import Client, segment
from banksman.cli.client.exchange import ClientError, NoServer, NotLetIn, RequestRefused
from banksman.cli.client.locate import ServerLocator
from banksman.cli.containment_flags import containment_of
from banksman.cli.output import (
    CannotWrite,
    as_line,
    close_stdout,
    say_aside,
    say_json,
    speak_any_language,
)
from banksman.errors import BanksmanError, UsageError

BROKEN_PIPE = 128 + signal.SIGPIPE
_NOTES = """\
The server is the first of: --url, BANKSMAN_URL, url in the settings, this user's running server
(found by its socket in the state folder). Without a server, the verb starts an embedded host. That
host ends with the verb, and its sessions stay in the store without a process. The store is the
first of: --store, BANKSMAN_STORE, store in the settings, the store in the state folder. The token
for a URL is the first of: BANKSMAN_TOKEN, the end of the URL (#token=…) and, only for the address
that this user's server announces, the token file in the state folder.

exit codes: 0 success, 1 the turn or command failed, 2 wrong usage, 3 no server or access denied, 4
the server refused, 5 cannot write to stdout (the request may have been carried out), 130 Ctrl-C.
"""


def interrupt_turn(client: Client, session: str, turn: str | None) -> dict[str, Any]:
    """Interrupt a turn and return the receipt. `turn`: None for the running turn."""
    place = "" if turn is None else f"/turns/{segment(turn)}"
    return client.post(f"/v1/sessions/{segment(session)}{place}/interrupt")


def receipt_in_words(receipt: dict[str, Any]) -> str:
    """Describe a receipt in one line."""
    queued = len(receipt["queued"])
    rest = f"; {queued} still queued" if queued else ""
    if not receipt["stopped"]:
        return f"not stopped: {str(receipt['by']).replace('_', ' ')}{rest}"
    return f"stopped, by {receipt['by']}{rest}"


# Opening a session, as `open`, `run` and `ask --open` do it.


def add_cwd(parser: Parser) -> None:
    """Add the flag --cwd."""
    parser.add_argument(
        "--cwd",
        metavar="FOLDER",
        help="working folder of the agent (default: this folder, if the server is local)",
    )


def add_fallback(parser: Parser) -> None:
    """Add the flag --fallback."""
    parser.add_argument(
        "--fallback",
        metavar="AGENTS",
        help="agents, separated by commas, that serve while AGENT is limited or not installed",
    )


def _fallback_of(arguments: argparse.Namespace, agent: str) -> list[str]:
    """Return the fall-backs of a new session: those of the flag, or those of the settings."""
    given: str | None = arguments.fallback
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    usual: list[str] = config.load().value("fallback")
    return [name for name in usual if name != agent]


def add_budget(parser: Parser) -> None:
    """Add the flags --budget and --on-budget."""
    parser.add_argument(
        "--budget",
        metavar="BUDGET",
        help="what the session may use over its whole life: UNIT=NUMBER,… with the units tokens, "
        "usd (an estimate), working_seconds, turns",
    )
    parser.add_argument(
        "--on-budget",
        choices=("queue", "stop", "ask"),
        help="when the budget is used up: finish the turn and send nothing more (queue, the "
        "default), interrupt the turn, too (stop), or ask a person (ask)",
    )


def _budget_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the members of a request body that --budget and --on-budget set."""
    found: dict[str, Any] = {}
    text = getattr(arguments, "budget", None)
    if text is not None:
        found["budget"] = _caps(text)
    if getattr(arguments, "on_budget", None) is not None:
        found["on_budget"] = arguments.on_budget
    return found


def _caps(text: str) -> dict[str, float]:
    # Imported here, because most calls have no budget.
    from banksman.sessions.arguments import parse_budget  # noqa: PLC0415

    budget = parse_budget(text, "--budget")
    assert budget is not None
    return {**budget.caps}


def add_caller(parser: Parser) -> None:
    """Add the flag --caller."""
    parser.add_argument(
        "--caller", type=_caller, metavar="NAME", help="count the usage of the turn under this name"
    )


def _caller(text: str) -> str:
    # Imported here, because the verbs without the flag start faster.
    from banksman.sessions.arguments import check_caller  # noqa: PLC0415

    # The server refuses the name too, but `run` would have opened its session by then.
    try:
        check_caller(text)
    except UsageError as exc:
        raise argparse.ArgumentTypeError(f"{exc.args[0]}: {exc.hint}") from exc
    return text


def ask_to_open(
    client: Client,
    arguments: argparse.Namespace,
    *,
    agent: str,
    name: str | None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Open a session and return it.

    The request has an idempotency key, so a retry after a lost connection opens no second session.
    `more`: further members of the request body.
    """
    body: dict[str, Any] = {"agent": agent, **_budget_of(arguments), **(more or {})}
    body |= containment_of(arguments)
    if name is not None:
        body["name"] = name
    if arguments.command:
        body["command"] = arguments.command
    # A remote server does not know the folders of this machine.
    if client.place.is_local:
        body["cwd"] = _whole(arguments.cwd or "")
    elif arguments.cwd is not None:
        body["cwd"] = arguments.cwd
    fallback = _fallback_of(arguments, agent)
    if fallback:
        body["fallback"] = fallback
    return client.post("/v1/sessions", body, key=uuid.uuid4().hex)


def _whole(folder: str) -> str:
    try:
        return os.path.abspath(folder)
    except FileNotFoundError as exc:
        hint = "cd to another folder, or pass an absolute path with --cwd"
        raise UsageError("cannot use the current folder: it was deleted", hint=hint) from exc


def priority_in(arguments: argparse.Namespace) -> int | str | None:
    """Return the value of --priority: a number, a name, or None without the flag."""
    given: str | None = arguments.priority
    try:
        return None if given is None else int(given)
    except ValueError:
        return given


def body_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the body of an ask: `prompt`, `priority`, and those of its options that are set."""
    prompt: str | None = arguments.prompt
    body: dict[str, Any] = {"prompt": _on_stdin() if prompt in (None, "-") else prompt}
    if arguments.priority is not None:
        body["priority"] = priority_in(arguments)
    if getattr(arguments, "on_busy", None) is not None:
        body["on_busy"] = arguments.on_busy
    if getattr(arguments, "hold", None) is not None:
        body["hold"] = arguments.hold
    if arguments.deadline is not None:
        body["deadline"] = arguments.deadline
    if arguments.caller is not None:
        body["caller"] = arguments.caller
    return body


def add_deadline(flags: Parser) -> None:
    """Add `--deadline`."""
    flags.add_argument(
        "--deadline",
        type=float,
        metavar="S",
        help="end the ask S seconds from now: withdraw it if it still waits, else stop its turn",
    )


def add_on_limit(flags: Parser) -> None:
    """Add `--on-limit`."""
    flags.add_argument(
        "--on-limit",
        choices=("fail", "wait"),
        help="while the agent's account is limited, asks fail (default), or wait for its end",
    )


def check_deadline(flags: Parser, arguments: argparse.Namespace) -> None:
    """Exit with a usage error if `--deadline` is no positive number of seconds."""
    if arguments.deadline is not None and not 0 < arguments.deadline < 1e8:
        flags.error("--deadline must be a number of seconds greater than 0")


def _on_stdin() -> str:
    stdin = cast("TextIO | None", sys.stdin)
    if stdin is None:
        raise UsageError("cannot read the prompt from stdin: stdin is closed")
    try:
        return stdin.buffer.read().decode()
    except UnicodeDecodeError as exc:
        raise UsageError("cannot read the prompt from stdin: it is not UTF-8") from exc


class ServerParser(Parser):
    """Argument parser of a verb that talks to a server, with the flags that all these verbs share.

    `streams`: the verb prints JSON objects line by line. `in_memory`: a store that ends with the
    verb is useful for it. `only_reads`: the verb does not create the store that --store names.
    """

    def __init__(
        self,
        verb: str,
        usage: str,
        description: str,
        example: str,
        *,
        streams: bool = False,
        in_memory: bool = False,
        only_reads: bool = False,
    ) -> None:
        super().__init__(verb, usage, description, example, notes=_NOTES)
        form = self.add_argument_group("server and output")
        form.add_argument(
            "--url", metavar="URL", help="URL of the server, or unix:PATH for its socket"
        )
        form.add_argument(
            "--cafile", metavar="PATH", help="CA certificates (PEM) to trust for a URL with https"
        )
        form.add_argument(
            "--store",
            metavar="STORE",
            help="store to use, with or without a server: sqlite:PATH or nats://HOST",
        )
        add_format(
            form,
            json="one object per line" if streams else "one object",
            quiet="only what a script needs",
        )
        self.set_defaults(in_memory=in_memory, only_reads=only_reads)


def client_of(arguments: argparse.Namespace, *, needs_server: str = "") -> Client:
    """Return a client for the server or the embedded host that the flags select.

    `needs_server`: why an embedded host is not enough, as the end of a sentence; empty if it is.
    """
    way: ServerLocator | None = getattr(arguments, "way", None)
    if way is None:
        way = arguments.way = ServerLocator(
            url=arguments.url,
            store=getattr(arguments, "store", None),
            cafile=getattr(arguments, "cafile", None),
            in_memory=getattr(arguments, "in_memory", False),
            only_reads=getattr(arguments, "only_reads", False),
            needs_server=needs_server,
        )
    return Client(way.place)


Act = Callable[[argparse.Namespace], int]


def perform(act: Act, arguments: argparse.Namespace) -> int:
    """Run a verb, and turn every failure into one line and an exit code.

    An embedded host has ended when this returns.
    """
    speak_any_language()
    is_json: bool = arguments.format == "json"
    try:
        code = act(arguments)
        # A normal end: work that other clients asked for may finish. After this call `_end` in the
        # finally block does nothing.
        _end(arguments, at_once=False)
        return code
    except BrokenPipeError:
        # The reader has enough (`| head -1`). That is a normal end and needs no message.
        close_stdout()
        return BROKEN_PIPE
    except BanksmanError as exc:
        return _failed(exc, is_json=is_json)
    except KeyboardInterrupt:
        # Another Ctrl-C during the exit must not print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    finally:
        _end(arguments, at_once=True)


def _end(arguments: argparse.Namespace, *, at_once: bool) -> None:
    way: ServerLocator | None = getattr(arguments, "way", None)
    if way is None or not way.is_embedded:
        return
    if at_once:
        # Stopping the running turns is already the fastest way out and has its deadlines. A further
        # signal would only leave the socket file behind.
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
        if isinstance(error, RequestRefused):
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
            # The embedded host failed as a server would have: the store cannot be opened, or the
            # machine has no room.
            return REFUSED
