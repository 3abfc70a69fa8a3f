"""What an ACP agent says, as far as one line tells by itself: version 1 of the protocol, JSON-RPC, one message a line.

Nearly every line is a `session/update`, and most of those are a piece of text, which says nothing about its turn. What
answers a request of ours, asks something of us, or is about what we must remember (tools of our conversation and no
other, what can be set, what it cost) comes out as `Told`, with the messages of the line: see conversation.py.

The boundary of a turn is the answer to its prompt. So a line that cannot be decoded is taken apart as far as it goes
(see core/wire/jsonrpc.py), and one that was too long to keep is judged by its two ends.

**Cost** per piece of text: one decode of three members, in which everything else is skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from banksman.core.dialects.meaning import Meaning, NeedsConversation, Noise, Thought
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification
from banksman.core.wire.partial_json import UNDECODABLE, mapping

UPDATE = "session/update"
MESSAGE, THOUGHT = "agent_message_chunk", "agent_thought_chunk"
# The updates that are about more than what a person sees.
REMEMBERED = frozenset(("tool_call", "tool_call_update", "current_mode_update", "config_option_update", "usage_update"))
# Those by which a turn has said or done something.
DEEDS = frozenset((MESSAGE, THOUGHT, "tool_call", "tool_call_update", "plan"))

_NOISE = Noise()
_THOUGHT = Thought()


class _Update(msgspec.Struct, gc=False):
    kind: Any = msgspec.field(default=None, name="sessionUpdate")


class _Params(msgspec.Struct, gc=False):
    update: _Update | None = None


class _AcpFrame(msgspec.Struct, gc=False):
    method: str = ""
    params: _Params | None = None
    id: Any = None


_decode = msgspec.json.Decoder(_AcpFrame).decode


def read(line: bytes) -> Meaning | None:
    """What a line means; None: it belongs to the turn and says nothing about it. Never raises."""
    try:
        frame = _decode(line)
    except UNDECODABLE:
        # No JSON, a batch, or a message with a value that is not what it should be.
        return _meaning(jsonrpc.decode(line), REMEMBERED)
    if frame.method == UPDATE and frame.id is None and frame.params is not None and frame.params.update is not None:
        kind = frame.params.update.kind
        if kind == MESSAGE:
            return None
        if not isinstance(kind, str) or kind not in REMEMBERED:
            return _unremembered(kind)
    return _meaning(jsonrpc.decode(line), REMEMBERED)


def read_closely(line: bytes) -> Meaning | None:
    """The same where what a turn says has to be remembered, because this agent tells a failure in no other way."""
    return _meaning(jsonrpc.decode(line), REMEMBERED | DEEDS)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """What a line that was too long to keep means, as far as its two ends tell. Never raises."""
    return _meaning((jsonrpc.decode_head(head, tail),), REMEMBERED)


def _meaning(messages: tuple[Message, ...], remembered: frozenset[str]) -> Meaning | None:
    message, *others = messages
    if others:
        # What is garbage among them costs nothing but itself.
        is_noise = all(isinstance(each, InvalidMessage) and not each.is_request for each in messages)
        return _NOISE if is_noise else NeedsConversation(messages)
    match message:
        case InvalidMessage(is_request=False):
            return _NOISE
        case Notification(method="session/update") as notice:
            kind = update_of(notice).get("sessionUpdate")
            return NeedsConversation(messages) if isinstance(kind, str) and kind in remembered else _unremembered(kind)
        case Notification() as notice if jsonrpc.withdrawn(notice) is None:
            # An extension of its own. It lives, and has not got on.
            return _NOISE
        case _:
            return NeedsConversation(messages)


def update_of(notice: Notification) -> dict[str, Any]:
    return mapping(notice.named.get("update"))


def _unremembered(kind: Any) -> Meaning | None:
    if kind == THOUGHT:
        return _THOUGHT
    # Of a kind that is new the turn has it, and its readers; what has no kind is no update.
    return None if isinstance(kind, str) else _NOISE
