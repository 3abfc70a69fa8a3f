"""An ACP agent's frames as session updates: they are that already, and are handed on as they came.

ACP tells each text once, so reading a frame alone and reading the frames of a turn in order is the same thing here.

The answer to a prompt may say how many tokens it took. That is no update: agents that say it also tell what fills the
model's window by updates of their own, and the two count different things (one agent's answers add up all its turns).
What the answer says is in the outcome of its turn.
"""

from __future__ import annotations

from typing import Any

from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import Notification
from banksman.core.wire.partial_json import mapping, text

Update = dict[str, Any]

# What is kept of the text of one message: its end, for a person to read.
SAID_CHARACTERS_MAX = 1 << 20
# Tools of one turn that are told apart. Beyond it the text goes on as one message.
CALLS_MAX = 10_000


def project(line: bytes) -> list[Update]:
    """A frame as session updates: none, one, or those of a batch. Never raises."""
    return [update for _, update in _updates(line)]


class AcpProjector:
    """The same for the frames of a turn, in order."""

    def project(self, line: bytes) -> list[Update]:
        return project(line)


class AcpTranscript:
    """The last message in the frames of a turn: its text since a tool was last begun, or, where messages have names,
    since the last change of name. Of a long one the end is kept, of at least `SAID_CHARACTERS_MAX`.

    The conversation that speaks first is the turn's; what others say (a subagent has one of its own) is not its answer.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._message: Any = None
        self._is_over = True
        # The tools that were told of. One agent tells of some only when they are over.
        self._calls: set[str] = set()
        self._text: list[str] = []
        self._length = 0

    def add(self, line: bytes) -> None:
        for session, update in _updates(line):
            if self._session is None:
                self._session = session
            if session != self._session:
                continue
            match update["sessionUpdate"]:
                case "tool_call" | "tool_call_update":
                    call = update.get("toolCallId")
                    if isinstance(call, str) and call not in self._calls and len(self._calls) < CALLS_MAX:
                        self._calls.add(call)
                        self._is_over = True
                case "agent_message_chunk":
                    text = said(update)
                    if text:
                        self._keep(text, update.get("messageId"))
                case _:
                    pass

    def text(self) -> str | None:
        """None: it has said nothing."""
        return "".join(self._text) or None

    def _keep(self, text: str, message: Any) -> None:
        # What was said before stays until something else is: a turn may end with a tool and no word about it.
        if self._is_over or message != self._message:
            self._is_over, self._message = False, message
            self._text, self._length = [], 0
        self._text.append(text)
        self._length += len(text)
        while self._length - len(self._text[0]) >= SAID_CHARACTERS_MAX:
            self._length -= len(self._text.pop(0))


def said(update: Update) -> str:
    """The text of a chunk; empty: it has none."""
    return text(mapping(update.get("content")).get("text")) or ""


def _updates(line: bytes) -> list[tuple[Any, Update]]:
    """The updates of a line, each with the conversation that it is of."""
    found: list[tuple[Any, Update]] = []
    for message in jsonrpc.decode(line):
        if isinstance(message, Notification) and message.method == "session/update" and not message.is_cut:
            update = mapping(message.named.get("update"))
            if isinstance(update.get("sessionUpdate"), str):
                found.append((message.named.get("sessionId"), update))
    return found
