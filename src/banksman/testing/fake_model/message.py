"""One reply, as Anthropic's events and as the whole message that they spell. Pure.

Each method returns the events to send and keeps what was said. A call that streams sends the events; one that does not
ignores them and sends `whole()` at the end: what the agent gets is the same either way.
"""

from __future__ import annotations

import enum
import json
import uuid
from typing import Any

Event = dict[str, Any]
# Anthropic's own rule of thumb: a token is about four characters.
TOKEN_CHARACTERS = 4
# The agent keeps it and sends it back with the block; nobody can check it, for the key is the vendor's.
SIGNATURE = "ZmFrZSBzaWduYXR1cmU="


class Kind(enum.Enum):
    """What the last block is; a tool call is never continued, and so is no kind of its own."""

    NONE, TEXT, THINKING = range(3)


class Message:
    """A reply while it is said."""

    def __init__(self, model: str, *, input_tokens: int) -> None:
        self._model = model
        self._id = new_id("msg")
        self._input_tokens = input_tokens
        # Finished blocks and, for the one that is open, the pieces of its text: joined once, at its end.
        self._content: list[dict[str, Any]] = []
        self._open = Kind.NONE
        self._pieces: list[str] = []
        self._characters = 0
        self._has_tools = False

    @property
    def is_empty(self) -> bool:
        return not self._content and self._open is Kind.NONE

    def start(self) -> list[Event]:
        # The ping comes here in the real stream too; an agent that stumbles over one should do so in a test.
        return [{"type": "message_start", "message": self._envelope(content=[])}, {"type": "ping"}]

    def text(self, words: str) -> list[Event]:
        events = self._continue(Kind.TEXT, {"type": "text", "text": ""})
        return [*events, self._say({"type": "text_delta", "text": words}, words)]

    def think(self, words: str) -> list[Event]:
        events = self._continue(Kind.THINKING, {"type": "thinking", "thinking": "", "signature": ""})
        return [*events, self._say({"type": "thinking_delta", "thinking": words}, words)]

    def tool(self, name: str, arguments: dict[str, object]) -> list[Event]:
        events = self._finish_block()
        block = {"type": "tool_use", "id": new_id("toolu"), "name": name}
        spelled = json.dumps(arguments)
        index = len(self._content)
        self._content.append({**block, "input": arguments})
        self._characters += len(spelled)
        self._has_tools = True
        return [
            *events,
            {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}},
            _delta(index, {"type": "input_json_delta", "partial_json": spelled}),
            {"type": "content_block_stop", "index": index},
        ]

    def finish(self) -> list[Event]:
        events = self._finish_block()
        ending = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        usage = {"output_tokens": self._output_tokens()}
        return [*events, {"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        """The finished message."""
        assert self._open is Kind.NONE
        return {**self._envelope(content=self._content), "stop_reason": self._stop_reason()}

    def _continue(self, kind: Kind, block: dict[str, Any]) -> list[Event]:
        if self._open is kind:
            return []
        events = self._finish_block()
        self._open = kind
        return [*events, {"type": "content_block_start", "index": len(self._content), "content_block": block}]

    def _say(self, delta: dict[str, Any], words: str) -> Event:
        self._pieces.append(words)
        self._characters += len(words)
        return _delta(len(self._content), delta)

    def _finish_block(self) -> list[Event]:
        index, words = len(self._content), "".join(self._pieces)
        stop: Event = {"type": "content_block_stop", "index": index}
        match self._open:
            case Kind.NONE:
                return []
            case Kind.TEXT:
                block, events = {"type": "text", "text": words}, [stop]
            case Kind.THINKING:
                block = {"type": "thinking", "thinking": words, "signature": SIGNATURE}
                events = [_delta(index, {"type": "signature_delta", "signature": SIGNATURE}), stop]
        self._content.append(block)
        self._open = Kind.NONE
        self._pieces.clear()
        return events

    def _stop_reason(self) -> str:
        return "tool_use" if self._has_tools else "end_turn"

    def _output_tokens(self) -> int:
        return 1 + self._characters // TOKEN_CHARACTERS

    def _envelope(self, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._input_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": self._output_tokens(),
            },
        }


def new_id(prefix: str) -> str:
    """Never the same twice, also across servers: a session that is resumed has ids of an earlier one in its history."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}
