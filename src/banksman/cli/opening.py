"""`banksman open`, `close` and `drain`: how a session begins and ends, and how a server does."""

from __future__ import annotations

import argparse
import os
import uuid
from typing import Any

from banksman.cli.client import Client, segment
from banksman.cli.terminal import as_line, say, say_json
from banksman.cli.verb import OK, Parser, client_of, perform, split_command


def open_session(words: list[str]) -> int:
    parser = Parser(
        "open",
        "AGENT [--name NAME] [--cwd FOLDER] [-- COMMAND …]",
        "Open a session with an agent; of a name that is known, the session that has it. COMMAND replaces the agent's.",
        "banksman open claude --name fix-ci",
    )
    parser.add_argument("agent", metavar="AGENT", help="one of those that the server knows, such as claude")
    parser.add_argument("--name", metavar="NAME", help="to be used instead of its id")
    add_cwd(parser)
    before, command = split_command(words)
    arguments = parser.read(before)
    arguments.command = command
    if command == []:
        parser.error("there is no command after --")
    return perform(_open, arguments)


def close_session(words: list[str]) -> int:
    parser = Parser(
        "close",
        "SESSION [--forget]",
        "Close a session: its agent's whole tree is ended. What was said is kept.",
        "banksman close fix-ci",
    )
    parser.add_argument("session", metavar="SESSION", help="its id or its name")
    parser.add_argument("--forget", action="store_true", help="and delete what was said in it, for good")
    return perform(_close, parser.read(words))


def drain(words: list[str]) -> int:
    parser = Parser(
        "drain",
        "[--timeout SECONDS]",
        "Tell the server to take nothing new, finish what runs, and exit.",
        "banksman drain --timeout 60",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="then end what still runs")
    return perform(_drain, parser.read(words))


def add_cwd(parser: Parser) -> None:
    parser.add_argument("--cwd", metavar="FOLDER", help="where the agent works (this folder, if the server is here)")


def ask_to_open(client: Client, arguments: argparse.Namespace, *, agent: str, name: str | None) -> dict[str, Any]:
    """The session. Repeated with the same key if the connection is lost, so that it is opened once."""
    body: dict[str, Any] = {"agent": agent}
    if name is not None:
        body["name"] = name
    if arguments.command:
        body["command"] = arguments.command
    if arguments.cwd is not None:
        # A server elsewhere knows nothing of where we are.
        body["cwd"] = os.path.abspath(arguments.cwd) if client.place.is_local else arguments.cwd
    elif client.place.is_local:
        body["cwd"] = os.getcwd()
    return client.post("/v1/sessions", body, key=uuid.uuid4().hex)


def _open(arguments: argparse.Namespace) -> int:
    session = ask_to_open(client_of(arguments), arguments, agent=arguments.agent, name=arguments.name)
    if arguments.format == "json":
        say_json(session)
    else:
        # In text too: `session=$(banksman open claude)` is what this is for.
        say(as_line(session["id"]))
    return OK


def _close(arguments: argparse.Namespace) -> int:
    path = f"/v1/sessions/{segment(arguments.session)}"
    session = client_of(arguments).request("DELETE", path, query={"forget": 1 if arguments.forget else None})
    match arguments.format:
        case "json":
            say_json(session if session is not None else {"forgotten": arguments.session})
        case "quiet":
            pass
        case _:
            say(as_line(f"{arguments.session}: {'forgotten' if session is None else session['phase']}"))
    return OK


def _drain(arguments: argparse.Namespace) -> int:
    body = {} if arguments.timeout is None else {"timeout": arguments.timeout}
    told = client_of(arguments).post("/v1/drain", body)
    match arguments.format:
        case "json":
            say_json(told)
        case "quiet":
            pass
        case _:
            say("the server takes nothing new, finishes what runs, and exits")
    return OK
