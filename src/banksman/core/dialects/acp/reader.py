"""Read one line of an ACP agent without memory: version 1, JSON-RPC, one message per line.

Nearly every line is a `session/update`, and most updates are a piece of text with no meaning for
the turn's state. Three kinds of lines come out as `NeedsConversation`, with their messages:

- replies to requests of Banksman,
- requests of the agent,
- updates that change remembered state: tools of this conversation, settings, cost, usage.

conversation.py resolves them.

The boundary of a turn is the answer to its prompt. Therefore no line may be lost. A line that
cannot be decoded is parsed as far as possible (see core/wire/jsonrpc.py). A line that was too long
to keep is judged by its two ends.

**Cost** per piece of text: one decode of three members. The decoder skips everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    Thought,
    ToolBegan,
    ToolEnded,
)
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification
from banksman.core.wire.partial_json import UNDECODABLE, mapping

UPDATE = "session/update"
MESSAGE, THOUGHT = "agent_message_chunk", "agent_thought_chunk"
# Updates that change the state in conversation.py.
REMEMBERED = frozenset(
    ("tool_call", "tool_call_update", "current_mode_update", "config_option_update", "usage_update")
)
# Updates that prove that the turn said or did something.
DEEDS = frozenset((MESSAGE, THOUGHT, "tool_call", "tool_call_update", "plan"))

_NOISE = Noise()
_THOUGHT = Thought()


class _Update(msgspec.Struct, gc=False):
    kind: Any = msgspec.field(default=None, name="sessionUpdate")
    meta: Any = msgspec.field(default=None, name="_meta")


class _Params(msgspec.Struct, gc=False):
    update: _Update | None = None


class _AcpFrame(msgspec.Struct, gc=False):
    method: str = ""
    params: _Params | None = None
    id: Any = None


_decode = msgspec.json.Decoder(_AcpFrame).decode


def read(line: bytes) -> Meaning | None:
    """Return the meaning of a line; None if the line is only content of the turn. Never raises."""
    try:
        frame = _decode(line)
    except UNDECODABLE:
        # The line is no JSON, a batch, or a message with a value of an unexpected type.
        return _meaning(jsonrpc.decode(line), REMEMBERED)
    if (
        frame.method == UPDATE
        and frame.id is None
        and frame.params is not None
        and frame.params.update is not None
    ):
        kind = frame.params.update.kind
        if kind == MESSAGE and frame.params.update.meta is None:
            return None
        if kind != MESSAGE and (not isinstance(kind, str) or kind not in REMEMBERED):
            return _unremembered(kind)
    return _meaning(jsonrpc.decode(line), REMEMBERED)


def read_closely(line: bytes) -> Meaning | None:
    """Read a line of an agent that reports failures only as text.

    The text of a turn must be remembered, so more kinds of updates need the conversation.
    """
    return _meaning(jsonrpc.decode(line), REMEMBERED | DEEDS)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """Return the meaning of a line too long to keep, judged by its two ends. Never raises."""
    return _meaning((jsonrpc.decode_head(head, tail),), REMEMBERED)


def _meaning(messages: tuple[Message, ...], remembered: frozenset[str]) -> Meaning | None:
    message, *others = messages
    if others:
        # An invalid message in a batch does not affect the other messages.
        is_noise = all(
            isinstance(each, InvalidMessage) and not each.is_request for each in messages
        )
        return _NOISE if is_noise else NeedsConversation(messages)
    match message:
        case InvalidMessage(is_request=False):
            return _NOISE
        case Notification(method="session/update") as notice:
            update = update_of(notice)
            kind = update.get("sessionUpdate")
            is_remembered = isinstance(kind, str) and kind in remembered
            if is_remembered or (kind == MESSAGE and usage_in(update)):
                return NeedsConversation(messages)
            return _unremembered(kind)
        case Notification() as notice if jsonrpc.withdrawn(notice) is None:
            # An extension of this agent. It proves that the agent is alive, but is no progress.
            return _NOISE
        case _:
            return NeedsConversation(messages)


def update_of(notice: Notification) -> dict[str, Any]:
    """Return the update of a `session/update` notification."""
    return mapping(notice.named.get("update"))


def usage_in(update: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage of a model call that one agent attaches to an empty piece of text."""
    return mapping(mapping(update.get("_meta")).get("usage"))


def tool_meanings(update: Mapping[str, Any], *, is_new: bool) -> tuple[Meaning, ...]:
    """Return the meaning of an update about a tool call. `is_new`: the update is the first."""
    call = update.get("toolCallId")
    if not isinstance(call, str):
        return ()
    match update.get("status"):
        case "completed" | "failed":
            return (ToolEnded((call,)),)
        case "in_progress":
            return (ToolBegan((call,)),)
        case _:
            # An update may omit the status. A new call without a status counts as begun.
            return (ToolBegan((call,)),) if is_new else ()


def _unremembered(kind: Any) -> Meaning | None:
    if kind == THOUGHT:
        return _THOUGHT
    # An unknown kind is content of the turn, which readers still see. Without a kind, the message
    # is no update.
    return None if isinstance(kind, str) else _NOISE
