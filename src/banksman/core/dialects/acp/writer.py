"""Prompts for ACP agents, and the purpose of each request sent to an agent.

A JSON-RPC reply names only the number of its request. The protocol state keeps a `Purpose` per
number, to match replies to requests. `Stage` is the purpose of a handshake request. The parameters
of the other requests are in `protocol_v1.py`, and `conversation.py` sends them.

A prompt is text or ACP content blocks. Every agent accepts text and links. An agent accepts other
blocks only if its capabilities say so, which is unknown before the handshake. Therefore `blocks`
checks a prompt against ACP when a caller asks, and `fitted` checks it against the agent's
capabilities when it is sent. A block that can become text does. Any other block (an image) is never
dropped silently: the turn fails, and the error names the unsupported block.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import Struct

from banksman.core.dialects.acp.protocol_v1 import AcpAgentInfo
from banksman.errors import UsageError


class Stage(enum.Enum):
    """Stage of the handshake: the reply it waits for. Also the purpose of a handshake request."""

    SILENT = "silent"
    INITIALIZING = "initializing"
    OPENING = "opening"
    LOADING = "loading"
    FENCING = "fencing"
    QUIETING = "quieting"
    ADJUSTING = "adjusting"
    READY = "ready"
    REFUSED = "refused"


class Prompted(Struct, frozen=True):
    """Purpose: a prompt. `is_cancelled`: Banksman has asked the agent to stop it."""

    ref: str
    is_cancelled: bool = False


class Adjusted(Struct, frozen=True):
    """Purpose: a change of a setting.

    `request`: the caller's request that waits for it; None means the handshake.
    """

    request: str | None
    name: str
    value: str


Purpose = Stage | Prompted | Adjusted


_HINT = "use text, or a list of ACP content blocks"


def blocks(prompt: Any) -> list[dict[str, Any]]:
    """Check a prompt and return it as ACP content blocks."""
    if isinstance(prompt, str):
        # Agents fail on an empty text, or wait for more.
        if not prompt:
            raise UsageError("the prompt is empty", hint=_HINT)
        return [{"type": "text", "text": prompt}]
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt cannot be {prompt!r:.60}", hint=_HINT)
    found = [_block(block) for block in cast(Sequence[Any], prompt)]
    if not found:
        raise UsageError("the prompt has no blocks", hint=_HINT)
    return found


def fitted(content: list[dict[str, Any]], agent: AcpAgentInfo) -> list[dict[str, Any]] | str:
    """Return the blocks in a form that this agent accepts, or the reason why it cannot."""
    kept: list[dict[str, Any]] = []
    for block in content:
        kind = block["type"]
        if (kind == "image" and not agent.takes_image) or (
            kind == "audio" and not agent.takes_audio
        ):
            return f"{agent.name} does not accept {kind} in a prompt: send a link, or describe it"
        if kind == "resource" and not agent.takes_resource:
            resource = block["resource"]
            if "text" not in resource:
                return f"{agent.name} does not accept embedded files in a prompt: send a link"
            told = f'<context ref="{resource["uri"]}">\n{resource["text"]}\n</context>'
            kept.append({"type": "text", "text": told})
        else:
            kept.append(block)
    return kept


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        hint = 'use a mapping with a "type"'
        raise UsageError(f"a content block cannot be {block!r:.60}", hint=hint)
    members = dict(cast(Mapping[str, Any], block))
    match members.get("type"):
        case "text":
            _need(members, "text")
        case "image" | "audio":
            _need(members, "data", "mimeType")
        case "resource_link":
            _need(members, "uri")
            # ACP requires a name, and callers omit it.
            members.setdefault("name", members["uri"].rsplit("/", 1)[-1] or members["uri"])
            _need(members, "name")
        case "resource":
            resource = members.get("resource")
            if not isinstance(resource, Mapping):
                hint = 'add "resource": {"uri": …, "text": …}'
                raise UsageError("a resource block has no resource", hint=hint)
            inner = cast(Mapping[str, Any], resource)
            _need(inner, "uri", "blob" if "blob" in inner and "text" not in inner else "text")
            members["resource"] = dict(inner)
        case unknown:
            hint = "use text, image, audio, resource or resource_link"
            raise UsageError(f"ACP has no content of type {unknown!r:.60}", hint=hint)
    return members


def _need(block: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value = block.get(name)
        if not isinstance(value, str):
            message = f"the {name} of a content block cannot be {value!r:.60}"
            raise UsageError(message, hint="use text")
