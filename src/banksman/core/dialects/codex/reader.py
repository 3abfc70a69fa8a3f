"""What the Codex app-server says, as far as a line tells it by itself. The rest is `Told`: see conversation.py.

It speaks JSON-RPC without the member that names the version. A turn is a stream of notices, each with the thread and
the turn it belongs to: `turn/started`, items that begin, grow and complete, and `turn/completed`, the boundary.

**Whose turn it is** no line says: that needs the ids of our requests. So replies, requests and the few notices about
turns are handed on; what comes by the thousand is known here.

**What is no failure.** `warning`, `configWarning`, an `error` that will be retried: the agent talks about itself, and
goes on. They are noise: kept, and no progress. That a turn failed is said by its boundary alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import Setup
from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    PromptSettled,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification
from banksman.core.wire.partial_json import decoded, items, mapping, text

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
    return _meaning(messages[0]) if len(messages) == 1 else NeedsConversation(messages)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """What a line that was too long to keep means, as far as its two ends tell. Never raises."""
    return _meaning(jsonrpc.decode_head(head, tail))


def plain(notice: Notification) -> Meaning | None:
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


def is_remembered(notice: Notification) -> bool:
    """Whether it says something that will be needed, or that means something only with what is known already."""
    if notice.method == ERROR:
        return notice.named.get("willRetry") is False
    if notice.method in ("item/started", "item/completed"):
        # They name a prompt of ours, are the answer, or say what a question will be about that names only the item.
        return mapping(notice.named.get("item")).get("type") in ("userMessage", "agentMessage", "fileChange")
    return notice.method in _REMEMBERED


def _meaning(message: Message) -> Meaning | None:
    if isinstance(message, InvalidMessage) and not message.is_request:
        return _NOISE
    if isinstance(message, Notification) and not is_remembered(message):
        return plain(message)
    return NeedsConversation((message,))


def answer_of(text: str | None) -> Any:
    """The value of an answer that was to be one, which is all of its text."""
    return None if text is None else decoded(text.encode(errors="replace"))


# A turn of Codex: while it runs, what will be said about it at its end; and how it ended.


class RunningTurn(Struct, frozen=True):
    """`refs`: our prompts that are known to be in it, the one that opened it first. `is_told`: the session knows of it.
    `text`: what the agent has said last. `before` and `after`: what the thread had used, where it is known."""

    id: str
    refs: tuple[str, ...] = ()
    is_told: bool = False
    text: str | None = None
    error: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None

    def named(self, ref: str) -> RunningTurn:
        return replace(self, refs=(*self.refs, ref), is_told=True)

    def counted(self, total: Mapping[str, Any], last: Mapping[str, Any]) -> RunningTurn:
        """After a call of the model. Of a thread that was resumed nobody may have said what it had used before."""
        before = _less(total, last) if self.before is None else self.before
        return replace(self, before=before, after=total)

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """Of this turn alone: the agent tells what the thread has used, and what the last call of the model has."""
        return None if self.after is None else _less(self.after, self.before or {})

    def over(self, turn: dict[str, Any], conversation: str | None, setup: Setup, *, is_cut: bool) -> EndedTurn:
        if is_cut:
            return EndedTurn.lost(self.id, "frame_too_large", conversation, self.usage)
        status = turn.get("status")
        said = [text(item.get("text")) for item in map(mapping, items(turn.get("items"))) if _is_said(item)]
        answer = said[-1] if said else self.text
        error = mapping(turn.get("error"))
        is_error = status not in ("completed", "interrupted")
        boundary = TurnOver(
            conversation=conversation,
            is_error=is_error,
            is_aborted=status == "interrupted",
            is_overflow=error.get("codexErrorInfo") == "contextWindowExceeded",
            text=answer,
            structured=answer_of(answer) if setup.schema is not None and status == "completed" else None,
            error=_error(error) or self.error or f"the turn is {status}" if is_error else None,
            stop_reason=text(status),
            usage=self.usage,
        )
        return EndedTurn(self.id, boundary)


def _is_said(item: dict[str, Any]) -> bool:
    return item.get("type") == "agentMessage"


def _error(error: dict[str, Any]) -> str | None:
    words = [word for name in ("message", "additionalDetails") if (word := text(error.get(name)))]
    return "\n".join(words) or None


def _less(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Counts without those that are in it already."""
    numbers = {name: value for name, value in total.items() if isinstance(value, int)}
    return {name: value - _count(part.get(name)) for name, value in numbers.items()}


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


class EndedTurn(Struct, frozen=True):
    """A turn that has ended. `result`: its boundary, without names. `is_told`: the session knows."""

    id: str
    result: TurnOver
    refs: tuple[str, ...] = ()
    is_told: bool = True

    @staticmethod
    def lost(id: str, error: str, conversation: str | None = None, usage: Mapping[str, Any] | None = None) -> EndedTurn:
        """It is over, and how it ended is not known."""
        return EndedTurn(id, TurnOver(conversation=conversation, is_error=True, error=error, usage=usage))

    @staticmethod
    def refused(error: str) -> EndedTurn:
        """The turn that a prompt would have had, had the agent taken it."""
        return EndedTurn("", TurnOver(is_error=True, error=error))

    def named(self, ref: str) -> EndedTurn:
        return replace(self, refs=(*self.refs, ref), is_told=True)

    def boundary(self, *refs: str) -> TurnOver:
        return replace(self.result, refs=refs)

    def told(self, *refs: str) -> tuple[Meaning, ...]:
        """The boundary, and that it is done with each of these. The one that opened the turn comes last: it ends it."""
        return (self.boundary(*refs), *(PromptSettled(ref) for ref in reversed(refs)))
