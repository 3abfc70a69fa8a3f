"""ACP frames as session updates, which pass unchanged; and the text of a turn's messages.

ACP sends each text once. Therefore a frame alone and the frames of a turn in order give the same
updates. `AcpTranscript` collects the last message of a turn. `SaidInTurn` is a part of the protocol
state: it shows whether a turn said anything, or sent an error as its answer.

The answer to a prompt may report token counts. They do not become an update. The agents that report
them also send updates about the use of the model's context window. The two numbers count different
things: the answers of one agent add up all its turns. The outcome of the turn has the counts of the
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.acp.reader import MESSAGE
from banksman.core.dialects.dialect import ERROR_CHARACTERS_MAX
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import Notification
from banksman.core.wire.partial_json import mapping, text

Update = dict[str, Any]

# Maximum characters kept of one message. The end is kept, for a person to read.
SAID_CHARACTERS_MAX = 1 << 20
# Maximum number of tool calls tracked in one turn. Beyond it, later text counts as one message.
CALLS_MAX = 10_000


def project(line: bytes) -> list[Update]:
    """Translate a frame to session updates: none, one, or the updates of a batch. Never raises."""
    return [update for _, update in _updates(line)]


class AcpProjector:
    """Translator of the frames of a turn. Stateless, because ACP sends each text once."""

    def project(self, line: bytes) -> list[Update]:
        return project(line)


class AcpTranscript:
    """Collector of the last message in the frames of a turn.

    The last message is the text since the last new tool call. Where messages have ids, it is the
    text since the last change of id. For a long message, at least the last `SAID_CHARACTERS_MAX`
    characters are kept.

    The conversation of the first update is the turn's conversation. Updates of other conversations
    (a subagent has its own) are not part of the answer.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._message: Any = None
        self._is_over = True
        # Tool calls seen in this turn. One agent reports some calls only when they are over.
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
                    if (
                        isinstance(call, str)
                        and call not in self._calls
                        and len(self._calls) < CALLS_MAX
                    ):
                        self._calls.add(call)
                        self._is_over = True
                case "agent_message_chunk":
                    text = said(update)
                    if text:
                        self._keep(text, update.get("messageId"))
                case _:
                    pass

    def text(self) -> str | None:
        """Return the last message, or None if the agent sent no text."""
        return "".join(self._text) or None

    def _keep(self, text: str, message: Any) -> None:
        # Keep the previous message until new text arrives. A turn may end with a tool call and no
        # text after it.
        if self._is_over or message != self._message:
            self._is_over, self._message = False, message
            self._text, self._length = [], 0
        self._text.append(text)
        self._length += len(text)
        while self._length - len(self._text[0]) >= SAID_CHARACTERS_MAX:
            self._length -= len(self._text.pop(0))


class SaidInTurn(Struct, frozen=True):
    """Text and actions of the open turn, as far as needed to detect an error sent as an answer.

    `text`: the last message; a message longer than any error is cut. `message`: its id. `call`: the
    last reported tool call.
    """

    text: str = ""
    message: str | None = None
    is_nothing: bool = True
    is_over: bool = False
    call: str = ""

    def told(self, update: Mapping[str, Any]) -> SaidInTurn:
        """Return the state after one more update."""
        if update["sessionUpdate"] != MESSAGE:
            # Text after a different tool call is a new message.
            call = update.get("toolCallId")
            is_other = isinstance(call, str) and call != self.call
            return replace(
                self,
                is_nothing=False,
                is_over=self.is_over or is_other,
                call=call if is_other else self.call,
            )
        piece = said(dict(update))
        if not piece:
            return self  # One agent attaches its usage numbers to an empty chunk.
        name = update.get("messageId")
        message = name if isinstance(name, str) else None
        before = "" if self.is_over or message != self.message else self.text
        # Keep one character more than an error may have, so that a longer text is recognised.
        return SaidInTurn(
            (before + piece)[: ERROR_CHARACTERS_MAX + 1], message, is_nothing=False, call=self.call
        )


NOTHING_SAID = SaidInTurn()


def said(update: Update) -> str:
    """Return the text of a chunk, or an empty string."""
    return text(mapping(update.get("content")).get("text")) or ""


def _updates(line: bytes) -> list[tuple[Any, Update]]:
    """Return the updates of a line, each with its conversation."""
    found: list[tuple[Any, Update]] = []
    for message in jsonrpc.decode(line):
        if (
            isinstance(message, Notification)
            and message.method == "session/update"
            and not message.is_cut
        ):
            update = mapping(message.named.get("update"))
            if isinstance(update.get("sessionUpdate"), str):
                found.append((message.named.get("sessionId"), update))
    return found
