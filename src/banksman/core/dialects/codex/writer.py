"""Requests to the Codex app-server: their parameters, prompts and purposes.

A reply names only the number of its request. The protocol state keeps a `Purpose` per number, to
match replies to requests.

The command line carries no setting. The request that opens the thread carries the folder, the
model, the policy and the instructions. The request that opens a turn carries the prompt and the
schema of its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct

from banksman.core.dialects.dialect import Setup, client
from banksman.errors import UsageError

# Approval policies: when the agent asks before it acts. Newer versions reject the oldest,
# `on-failure`, with an error.
POLICIES = ("untrusted", "on-request", "never", "on-failure")
# The parameters that change a setting.
_SETTINGS = {"model": "model", "permission_mode": "approvalPolicy"}
# The agent refuses a longer input.
INPUT_CHARACTERS_MAX = 1 << 20


class Initialize(Struct, frozen=True):
    """Purpose: the handshake."""

    request: str


class Converse(Struct, frozen=True):
    """Purpose: start, resume or fork the thread."""

    request: str


class Begin(Struct, frozen=True):
    """Purpose: a prompt that opens a turn.

    `is_added`: another such prompt is pending, and this prompt is meant to join its turn.
    """

    ref: str
    is_added: bool = False


class Join(Struct, frozen=True):
    """Purpose: a prompt for the running turn."""

    ref: str
    turn: str


class Stop(Struct, frozen=True):
    """Purpose: an interrupt of a turn. `requests`: the callers' requests that wait for it."""

    requests: tuple[str, ...]
    turn: str


Purpose = Initialize | Converse | Begin | Join | Stop


def is_settled(purpose: Purpose, turn: str, refs: tuple[str, ...]) -> bool:
    """Return whether a request concerns only an ended turn. `refs`: the prompts of that turn."""
    match purpose:
        case Stop(turn=stopped):
            return stopped == turn
        case Begin(ref=ref) | Join(ref=ref):
            return ref in refs
        case _:
            return False


INITIALIZE: dict[str, Any] = {"clientInfo": client()}


def thread(setup: Setup) -> tuple[str, dict[str, Any]]:
    """Return the method and the parameters that open the conversation of a process."""
    wishes: dict[str, Any] = {
        "cwd": setup.cwd or None,
        "model": setup.model,
        "approvalPolicy": setup.permission_mode,
        # Added to the agent's own instructions, which describe the use of its tools.
        "developerInstructions": setup.system_prompt,
        "config": {"mcp_servers": dict(map(_server, setup.mcp_servers))}
        if setup.mcp_servers
        else None,
    }
    params = {name: value for name, value in wishes.items() if value is not None}
    if setup.conversation is None:
        return "thread/start", params
    return "thread/fork" if setup.forks else "thread/resume", {
        "threadId": setup.conversation,
        **params,
    }


def _server(server: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert an MCP server: ACP has a list of named values where Codex has an object."""
    pairs = {
        member: {pair["name"]: pair["value"] for pair in server.get(member, ())}
        for member in ("env", "headers")
    }
    if "command" in server:
        return server["name"], {
            "command": server["command"],
            "args": list(server.get("args", ())),
            "env": pairs["env"],
        }
    return server["name"], {"url": server["url"], "http_headers": pairs["headers"]}


def content(prompt: Any) -> list[dict[str, Any]]:
    """Check a prompt and convert it. Raises `UsageError` if the agent cannot take it."""
    hint = "use text, or a list of ACP content blocks"
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError("the prompt is empty", hint=hint)
        parts = [_text(prompt)]
    elif isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt cannot be {prompt!r:.60}", hint=hint)
    else:
        parts = [_part(block) for block in cast(Sequence[Any], prompt)]
    if not parts:
        raise UsageError("the prompt has no blocks", hint=hint)
    if sum(len(part.get("text", "")) for part in parts) > INPUT_CHARACTERS_MAX:
        hint = "put it into a file, and name the file in the prompt"
        raise UsageError(f"the prompt has more than {INPUT_CHARACTERS_MAX} characters", hint=hint)
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _part(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        hint = 'use a mapping with a "type"'
        raise UsageError(f"a content block cannot be {block!r:.60}", hint=hint)
    members = cast(Mapping[str, Any], block)
    match members.get("type"):
        case "text":
            return _text(_member(members, "text"))
        case "image":
            return {
                "type": "image",
                "url": f"data:{_member(members, 'mimeType')};base64,{_member(members, 'data')}",
            }
        case "resource_link":
            return _linked(members)
        case "resource":
            resource = members.get("resource")
            if not isinstance(resource, Mapping):
                hint = 'add "resource": {"uri": …, "text": …}'
                raise UsageError("a resource block has no resource", hint=hint)
            inner = cast(Mapping[str, Any], resource)
            uri, text = _member(inner, "uri"), _member(inner, "text")
            return _text(f'<context ref="{uri}">\n{text}\n</context>')
        case unknown:
            hint = "use text, image, resource with a text, or resource_link"
            message = f"this agent does not accept content of type {unknown!r:.60}"
            raise UsageError(message, hint=hint)


def _linked(block: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a link: the agent loads an image file, and gets only the name of any other file."""
    uri, media_type = _member(block, "uri"), block.get("mimeType")
    if (
        isinstance(media_type, str)
        and media_type.startswith("image/")
        and uri.startswith("file:///")
    ):
        return {"type": "localImage", "path": uri.removeprefix("file://")}
    return _text(f"[@{block.get('name') or 'file'}]({uri})")


def _member(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        message = f"the {name} of a content block cannot be {value!r:.60}"
        raise UsageError(message, hint="use text")
    return value


def turn(
    thread: str,
    ref: str,
    parts: list[dict[str, Any]],
    *,
    wishes: Iterable[tuple[str, str]],
    schema: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Build a prompt that opens a turn. `clientUserMessageId`: the ref, which its item repeats.

    `wishes`: settings that hold from this turn on. `schema`: of the turn's answer.
    """
    params: dict[str, Any] = {"threadId": thread, "clientUserMessageId": ref, "input": parts}
    params |= {_SETTINGS[name]: value for name, value in wishes if name in _SETTINGS}
    if schema is not None:
        params["outputSchema"] = dict(schema)
    return params


def steer(thread: str, turn: str, ref: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a prompt for the running turn. The agent refuses it if that turn is over."""
    return {"threadId": thread, "expectedTurnId": turn, "clientUserMessageId": ref, "input": parts}
