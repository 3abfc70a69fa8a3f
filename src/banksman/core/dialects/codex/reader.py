"""Read lines of the Codex app-server without memory, and build the boundary of a turn.

`read` returns the meaning of one line. `RunningTurn` and `EndedTurn` are values for
`conversation.py`: they collect the data of a turn, and give its boundary. The app-server speaks
JSON-RPC without the version member. A turn is a stream of notifications, each with its thread and
turn: `turn/started`, items that begin, grow and complete, and `turn/completed`, the boundary.

**Ownership of a turn** is not in any line: it needs the ids of Banksman's requests. Therefore
replies, requests and the few notifications about turns come out as `NeedsConversation`, which
conversation.py resolves. The frequent frames are decided here.

**No failures:** `warning`, `configWarning`, and an `error` that will be retried. By these the agent
reports about itself and continues. The warnings are noise: the log keeps them, and they are no
progress. Only the boundary says that a turn failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.codex import provider_errors
from banksman.core.dialects.dialect import Setup
from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    PromptSettled,
    ProviderFailure,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.dialects.tokens import tokens_in
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification, RpcReply
from banksman.core.wire.partial_json import decoded, items, mapping, text
from banksman.errors import ErrorKind

# Frames that are only content of the turn. The first bytes decide, because a JSON writer does not
# repeat a member.
_TEXT = (
    b'{"method":"item/agentMessage/delta",',
    b'{"method":"item/commandExecution/outputDelta",',
)
_THINKING = b'{"method":"item/reasoning/'

# Items for which a turn waits, perhaps in silence: tools, a compaction of the conversation, and a
# sleep.
TOOLS = frozenset(
    (
        *(
            "commandExecution",
            "fileChange",
            "mcpToolCall",
            "dynamicToolCall",
            "collabAgentToolCall",
        ),
        *("webSearch", "imageView", "imageGeneration", "sleep", "contextCompaction"),
    )
)
# Notifications that prove progress.
_PROGRESS = frozenset(
    (
        *(
            "item/started",
            "item/completed",
            "item/agentMessage/delta",
            "item/plan/delta",
            "item/mcpToolCall/progress",
        ),
        *("item/commandExecution/outputDelta", "item/commandExecution/terminalInteraction"),
        *(
            "item/fileChange/outputDelta",
            "item/fileChange/patchUpdated",
            "turn/diff/updated",
            "turn/plan/updated",
        ),
        *(
            "item/autoApprovalReview/started",
            "item/autoApprovalReview/completed",
            "hook/started",
            "hook/completed",
        ),
        *("thread/compacted", "model/rerouted"),
    )
)
# Notifications that need the state of the protocol.
TURN_STARTED = "turn/started"
TURN_COMPLETED = "turn/completed"
TOKEN_USAGE = "thread/tokenUsage/updated"
ERROR = "error"
RESOLVED = "serverRequest/resolved"
RATE_LIMITS = "account/rateLimits/updated"
_REMEMBERED = frozenset((TURN_STARTED, TURN_COMPLETED, TOKEN_USAGE, RESOLVED))

# The id goes into the log, and into the request to the next process.
CONVERSATION_CHARACTERS_MAX = 256
# Phrases by which the agent reports an unknown thread: it never had a message, or its file is
# missing.
_UNKNOWN = ("no rollout found", "thread not found", "invalid session id", "invalid thread id")

_NOISE = Noise()
_THOUGHT = Thought()


def read(line: bytes) -> Meaning | None:
    """Return the meaning of a line; None if the line is only content of the turn. Never raises."""
    if line.startswith(_TEXT):
        return None
    if line.startswith(_THINKING):
        return _THOUGHT
    messages = jsonrpc.decode(line)
    return _meaning(messages[0]) if len(messages) == 1 else NeedsConversation(messages)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """Return the meaning of a line too long to keep, judged by its two ends. Never raises."""
    return _meaning(jsonrpc.decode_head(head, tail))


def plain(notice: Notification) -> Meaning | None:
    """Return the meaning of a notification that needs no memory."""
    method = notice.method
    if method in ("item/started", "item/completed"):
        item = mapping(notice.named.get("item"))
        call = item.get("id")
        if text(item.get("type")) in TOOLS and isinstance(call, str):
            return ToolBegan((call,)) if method == "item/started" else ToolEnded((call,))
        return None
    if method.startswith("item/reasoning/"):
        return _THOUGHT
    if method == ERROR and notice.named.get("willRetry") is True:
        return provider_errors.retrying(mapping(notice.named.get("error")))
    if method == RATE_LIMITS:
        return provider_errors.limits(mapping(notice.named.get("rateLimits"))) or _NOISE
    return None if method in _PROGRESS else _NOISE


def is_remembered(notice: Notification) -> bool:
    """Return whether a notification changes the protocol state, or needs it to be understood."""
    if notice.method == ERROR:
        return notice.named.get("willRetry") is False
    if notice.method in ("item/started", "item/completed"):
        # These items name a prompt, hold the answer, or hold the changes of an approval request
        # that will carry only the item's id.
        return mapping(notice.named.get("item")).get("type") in (
            "userMessage",
            "agentMessage",
            "fileChange",
        )
    return notice.method in _REMEMBERED


def _meaning(message: Message) -> Meaning | None:
    if isinstance(message, InvalidMessage) and not message.is_request:
        return _NOISE
    if isinstance(message, Notification) and not is_remembered(message):
        return plain(message)
    return NeedsConversation((message,))


def is_only_state(notice: Notification) -> bool:
    """Return whether the state alone covers a notification. An item may also be a tool."""
    return is_remembered(notice) and not notice.method.startswith("item/")


def conversation(reply: RpcReply, setup: Setup) -> str | None:
    """Return the id of the thread that a reply opened, or None."""
    name = text(mapping(reply.named.get("thread")).get("id"))
    if name is None and not setup.forks:
        name = setup.conversation  # A reply with a long history may be truncated, without its id.
    return (
        name if name and len(name) <= CONVERSATION_CHARACTERS_MAX and name.isprintable() else None
    )


def is_unknown(error: str, setup: Setup) -> bool:
    """Return whether an error says that the agent does not have the thread to resume."""
    return setup.conversation is not None and any(word in error.lower() for word in _UNKNOWN)


def answer_of(text: str | None) -> Any:
    """Parse a structured answer: the whole text is one JSON value."""
    return None if text is None else decoded(text.encode(errors="replace"))


class RunningTurn(Struct, frozen=True):
    """A turn in progress, with the data for its boundary.

    `refs`: prompts known to be in the turn; the prompt that opened it comes first. `is_told`: the
    session knows of the turn. `text`: the agent's last message. `before` and `after`: token usage
    of the thread before the turn and now, where known.
    """

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
        """Return the turn after one model call.

        The usage before the turn may be unknown in a resumed thread. It is then computed from the
        total and the last call.
        """
        before = _less(total, last) if self.before is None else self.before
        return replace(self, before=before, after=total)

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """Token usage of this turn alone. The agent reports only the total and the last call."""
        return None if self.after is None else _less(self.after, self.before or {})

    def over(
        self, turn: dict[str, Any], conversation: str | None, setup: Setup, *, is_cut: bool
    ) -> EndedTurn:
        """Return the ended turn, built from the agent's `turn/completed`."""
        if is_cut:
            return EndedTurn.lost(self.id, "frame_too_large", conversation, self.usage)
        status = turn.get("status")
        said = [
            text(item.get("text"))
            for item in map(mapping, items(turn.get("items")))
            if _is_said(item)
        ]
        answer = said[-1] if said else self.text
        error = mapping(turn.get("error"))
        is_error = status not in ("completed", "interrupted")
        told = _error(error) or self.error or f"the turn ended as {status}"
        failure = provider_errors.failure(error, told) if is_error else None
        boundary = TurnOver(
            conversation=conversation,
            is_error=is_error,
            is_aborted=status == "interrupted",
            is_overflow=failure is not None and failure.kind is ErrorKind.CONTEXT_OVERFLOW,
            text=answer,
            structured=answer_of(answer)
            if setup.schema is not None and status == "completed"
            else None,
            error=told if is_error else None,
            stop_reason=text(status),
            usage=self.usage,
            tokens=tokens_in(self.usage),
            failure=failure,
        )
        return EndedTurn(self.id, boundary)


def _is_said(item: dict[str, Any]) -> bool:
    return item.get("type") == "agentMessage"


def _error(error: dict[str, Any]) -> str | None:
    words = [word for name in ("message", "additionalDetails") if (word := text(error.get(name)))]
    return "\n".join(words) or None


def _less(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Subtract counts member by member."""
    numbers = {name: value for name, value in total.items() if isinstance(value, int)}
    return {name: value - _count(part.get(name)) for name, value in numbers.items()}


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


class EndedTurn(Struct, frozen=True):
    """A turn that has ended.

    `result`: its boundary, without refs. `is_told`: the session knows of the turn.
    """

    id: str
    result: TurnOver
    refs: tuple[str, ...] = ()
    is_told: bool = True

    @staticmethod
    def lost(
        id: str, error: str, conversation: str | None = None, usage: Mapping[str, Any] | None = None
    ) -> EndedTurn:
        """Return a turn that is over with an unknown result."""
        over = TurnOver(
            conversation=conversation,
            is_error=True,
            error=error,
            usage=usage,
            tokens=tokens_in(usage),
            failure=ProviderFailure(ErrorKind.PROTOCOL),
        )
        return EndedTurn(id, over)

    @staticmethod
    def refused(error: str) -> EndedTurn:
        """Return the failed turn of a prompt that the agent refused."""
        failure = ProviderFailure(ErrorKind.INVALID_REQUEST)
        return EndedTurn("", TurnOver(is_error=True, error=error, failure=failure))

    def named(self, ref: str) -> EndedTurn:
        return replace(self, refs=(*self.refs, ref), is_told=True)

    def boundary(self, *refs: str) -> TurnOver:
        return replace(self.result, refs=refs)

    def told(self, *refs: str) -> tuple[Meaning, ...]:
        """Return the boundary, then the settlement of each prompt.

        The prompt that opened the turn settles last, because its settlement ends the turn.
        """
        return (self.boundary(*refs), *(PromptSettled(ref) for ref in reversed(refs)))
