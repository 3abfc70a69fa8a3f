"""What the Codex app-server says, as far as a line tells it by itself. The rest is `Told`: see codex_speech.py.

It speaks JSON-RPC without the member that names the version. A turn is a stream of notices, each with the thread and
the turn it belongs to: `turn/started`, items that begin, grow and complete, and `turn/completed`, the boundary.

**Whose turn it is** no line says: that needs the ids of our requests. So replies, requests and the few notices about
turns are handed on; what comes by the thousand is known here.

**What is no failure.** `warning`, `configWarning`, an `error` that will be retried: the agent talks about itself, and
goes on. They are noise: kept, and no progress. That a turn failed is said by its boundary alone.
"""

from __future__ import annotations

from typing import Any

from banksman.core import jsonrpc
from banksman.core.json_values import mapping, text
from banksman.core.jsonrpc import Garbage, Message, Notice
from banksman.core.meaning import Meaning, Noise, Thought, Told, ToolBegan, ToolEnded
from banksman.core.members import decoded

# Frames that are the turn's work. The first bytes settle it: a writer of JSON does not name a member twice.
_TEXT = (
    b'{"method":"item/agentMessage/delta",',
    b'{"method":"item/commandExecution/outputDelta",',
)
_THINKING = b'{"method":"item/reasoning/'

# What a turn waits for, in silence if need be: its tools; a conversation that is being made shorter; and a sleep.
TOOLS = frozenset(
    (
        *("commandExecution", "fileChange", "mcpToolCall", "dynamicToolCall", "collabAgentToolCall"),
        *("webSearch", "imageView", "imageGeneration", "sleep", "contextCompaction"),
    )
)
# Notices by which it shows that it gets on.
_PROGRESS = frozenset(
    (
        *("item/started", "item/completed", "item/agentMessage/delta", "item/plan/delta", "item/mcpToolCall/progress"),
        *("item/commandExecution/outputDelta", "item/commandExecution/terminalInteraction"),
        *("item/fileChange/outputDelta", "item/fileChange/patchUpdated", "turn/diff/updated", "turn/plan/updated"),
        *("item/autoApprovalReview/started", "item/autoApprovalReview/completed", "hook/started", "hook/completed"),
        *("thread/compacted", "model/rerouted"),
    )
)
# Notices that only the memory of the process understands.
TURN_STARTED = "turn/started"
TURN_COMPLETED = "turn/completed"
TOKEN_USAGE = "thread/tokenUsage/updated"
ERROR = "error"
RESOLVED = "serverRequest/resolved"
_REMEMBERED = frozenset((TURN_STARTED, TURN_COMPLETED, TOKEN_USAGE, RESOLVED))

_NOISE = Noise()
_THOUGHT = Thought()


def read(line: bytes) -> Meaning | None:
    """What a line means; None: it belongs to the turn and says nothing about it. Never raises."""
    if line.startswith(_TEXT):
        return None
    if line.startswith(_THINKING):
        return _THOUGHT
    messages = jsonrpc.decode(line)
    return _meaning(messages[0]) if len(messages) == 1 else Told(messages)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """What a line that was too long to keep means, as far as its two ends tell. Never raises."""
    return _meaning(jsonrpc.decode_head(head, tail))


def plain(notice: Notice) -> Meaning | None:
    """What a notice means that needs no memory."""
    method = notice.method
    if method in ("item/started", "item/completed"):
        item = mapping(notice.named.get("item"))
        call = item.get("id")
        if text(item.get("type")) in TOOLS and isinstance(call, str):
            return ToolBegan((call,)) if method == "item/started" else ToolEnded((call,))
        return None
    if method.startswith("item/reasoning/"):
        return _THOUGHT
    return None if method in _PROGRESS else _NOISE


def is_remembered(notice: Notice) -> bool:
    """Whether it says something that will be needed, or that means something only with what is known already."""
    if notice.method == ERROR:
        return notice.named.get("willRetry") is False
    if notice.method in ("item/started", "item/completed"):
        # They name a prompt of ours, are the answer, or say what a question will be about that names only the item.
        return mapping(notice.named.get("item")).get("type") in ("userMessage", "agentMessage", "fileChange")
    return notice.method in _REMEMBERED


def _meaning(message: Message) -> Meaning | None:
    if isinstance(message, Garbage) and not message.is_request:
        return _NOISE
    if isinstance(message, Notice) and not is_remembered(message):
        return plain(message)
    return Told((message,))


def answer_of(text: str | None) -> Any:
    """The value of an answer that was to be one, which is all of its text."""
    return None if text is None else decoded(text.encode(errors="replace"))
