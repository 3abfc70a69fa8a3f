"""What verbs do with a session: open it, read the prompt for it, interrupt its turn."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any, TextIO, cast

from banksman.cli.arguments import Parser
from banksman.cli.client.client import Client, segment
from banksman.errors import UsageError


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
