"""What a request of ours to the Codex app-server is for: what its reply, which names only a number, is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import Struct

from banksman.core.dialects.dialect import Setup, client
from banksman.errors import UsageError


class Initialize(Struct, frozen=True):
    request: str


class Converse(Struct, frozen=True):
    """The thread is begun, resumed or forked."""

    request: str


class Begin(Struct, frozen=True):
    """A prompt that opens a turn. `is_added`: another is on its way, whose turn it is to join."""

    ref: str
    is_added: bool = False


class Join(Struct, frozen=True):
    """A prompt for the turn that runs."""

    ref: str
    turn: str


class Stop(Struct, frozen=True):
    requests: tuple[str, ...]
    turn: str


Purpose = Initialize | Converse | Begin | Join | Stop


# What is written to the Codex app-server: the parameters of our requests, and prompts as it takes them.
#
# Nothing of a session's wishes goes by the command line: the thread is begun with the folder, the model, the policy and
# the instructions, and a turn with the prompt and the form of its answer.

# When it asks before it acts; the oldest of these is gone from newer versions, which say so.
POLICIES = ("untrusted", "on-request", "never", "on-failure")
# It refuses a longer input.
INPUT_CHARACTERS_MAX = 1 << 20

INITIALIZE: dict[str, Any] = {"clientInfo": client()}


def thread(setup: Setup) -> tuple[str, dict[str, Any]]:
    """The request that gives a process its conversation."""
    wishes: dict[str, Any] = {
        "cwd": setup.cwd or None,
        "model": setup.model,
        "approvalPolicy": setup.permission_mode,
        # Beside its own, which say how its tools are used.
        "developerInstructions": setup.system_prompt,
        "config": {"mcp_servers": dict(map(_server, setup.mcp_servers))} if setup.mcp_servers else None,
    }
    params = {name: value for name, value in wishes.items() if value is not None}
    if setup.conversation is None:
        return "thread/start", params
    return "thread/fork" if setup.forks else "thread/resume", {"threadId": setup.conversation, **params}


def _server(server: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """ACP has a list of named values where the agent has an object."""
    pairs = {member: {pair["name"]: pair["value"] for pair in server.get(member, ())} for member in ("env", "headers")}
    if "command" in server:
        return server["name"], {"command": server["command"], "args": list(server.get("args", ())), "env": pairs["env"]}
    return server["name"], {"url": server["url"], "http_headers": pairs["headers"]}


def content(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as the agent takes it, or an error that says why it cannot."""
    hint = "text, or a list of ACP content blocks"
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
        raise UsageError(
            f"this agent takes no more than {INPUT_CHARACTERS_MAX} characters", hint="put it into a file, and name that"
        )
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _part(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        raise UsageError(f"a content block cannot be {block!r:.60}", hint='a mapping with a "type"')
    members = cast(Mapping[str, Any], block)
    match members.get("type"):
        case "text":
            return _text(_member(members, "text"))
        case "image":
            return {"type": "image", "url": f"data:{_member(members, 'mimeType')};base64,{_member(members, 'data')}"}
        case "resource_link":
            return _linked(members)
        case "resource":
            resource = members.get("resource")
            if not isinstance(resource, Mapping):
                raise UsageError("a resource block has no resource", hint='"resource": {"uri": …, "text": …}')
            inner = cast(Mapping[str, Any], resource)
            uri, text = _member(inner, "uri"), _member(inner, "text")
            return _text(f'<context ref="{uri}">\n{text}\n</context>')
        case unknown:
            hint = "text, image, resource with a text, or resource_link"
            raise UsageError(f"this agent takes no content of type {unknown!r:.60}", hint=hint)


def _linked(block: Mapping[str, Any]) -> dict[str, Any]:
    """A file that is an image is looked at; any other is named."""
    uri, media_type = _member(block, "uri"), block.get("mimeType")
    if isinstance(media_type, str) and media_type.startswith("image/") and uri.startswith("file:///"):
        return {"type": "localImage", "path": uri.removeprefix("file://")}
    return _text(f"[@{block.get('name') or 'file'}]({uri})")


def _member(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise UsageError(f"the {name} of a content block cannot be {value!r:.60}", hint="text")
    return value


def turn(thread: str, ref: str, parts: list[dict[str, Any]], wishes: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt that opens a turn. `clientUserMessageId`: our name for it, which its item repeats."""
    return {"threadId": thread, "clientUserMessageId": ref, "input": parts, **wishes}


def steer(thread: str, turn: str, ref: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A prompt that joins the turn that runs, or is refused if that is over."""
    return {"threadId": thread, "expectedTurnId": turn, "clientUserMessageId": ref, "input": parts}
