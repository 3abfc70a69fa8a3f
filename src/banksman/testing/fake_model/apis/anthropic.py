"""Anthropic's Messages API in the fake model: read requests of Claude Code, build replies.

`read` is pure, `AnthropicMessage` is the reply under construction, and neither does I/O. Claude
Code 2.1.325 encodes a conversation like this, as far as it matters here:

- Tool results come in messages of the role "user". Reminders of the agent are separate text blocks
  beside them and beside the prompt.
- After an interrupt before any answer, the old prompt, "[Request interrupted by user]" and the new
  prompt are three blocks of one message.
- A prompt that arrives while the agent works comes after the tool results, in a message of the role
  "system", framed by explanations. Prompts that waited for the end of a turn are joined into one
  block.
- After an answer that lacks a required structured output, a message of the role "user" demands it.
"""

from __future__ import annotations

import enum
import json
from typing import Any

from banksman.testing.fake_model.apis import (
    Api,
    BadRequest,
    Body,
    Entry,
    ModelCall,
    ModelEvent,
    Who,
    named,
    new_id,
    objects,
    tokens,
    wants_stream,
)

MODEL = "claude-fake-1"
# The agent stores it and sends it back with the block. The agent cannot verify it, because only the
# vendor has the key.
SIGNATURE = "ZmFrZSBzaWduYXR1cmU="
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
ROLES = {"user": Who.USER, "assistant": Who.MODEL, "system": Who.SYSTEM}


def read(body: Body) -> list[Entry]:
    messages = objects(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages: at least one message is required")
    return [_entry(message) for message in messages if message.get("role") in ROLES]


def _entry(message: dict[str, Any]) -> Entry:
    content = message.get("content")
    blocks = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else objects(content, "messages: content")
    )
    said = [
        block["text"]
        for block in blocks
        if block.get("type") == "text" and isinstance(block.get("text"), str)
    ]
    has_result = any(block.get("type") == "tool_result" for block in blocks)
    return Entry(ROLES[message["role"]], tuple(said), has_result)


class BlockKind(enum.Enum):
    """Kind of the open block. A tool call is never continued, so it has no kind."""

    NONE, TEXT, THINKING = range(3)


class AnthropicMessage:
    """Reply under construction, in the format of the Messages API."""

    def __init__(self, call: ModelCall) -> None:
        self._model = call.model(MODEL)
        self._id = new_id("msg")
        self._input_tokens = call.input_tokens
        # Finished blocks, and the text pieces of the open block, which are joined once, when it
        # ends.
        self._content: list[dict[str, Any]] = []
        self._open = BlockKind.NONE
        self._pieces: list[str] = []
        self._characters = 0
        self._has_tools = False

    @property
    def is_empty(self) -> bool:
        return not self._content and self._open is BlockKind.NONE

    def start(self) -> list[ModelEvent]:
        # The real stream has a ping here too. An agent that fails on a ping should fail in a test.
        return [
            named({"type": "message_start", "message": self._envelope(content=[])}),
            named({"type": "ping"}),
        ]

    def text(self, words: str) -> list[ModelEvent]:
        events = self._continue(BlockKind.TEXT, {"type": "text", "text": ""})
        return [*events, self._say({"type": "text_delta", "text": words}, words)]

    def think(self, words: str) -> list[ModelEvent]:
        events = self._continue(
            BlockKind.THINKING, {"type": "thinking", "thinking": "", "signature": ""}
        )
        return [*events, self._say({"type": "thinking_delta", "thinking": words}, words)]

    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]:
        events = self._finish_block()
        block = {"type": "tool_use", "id": new_id("toolu"), "name": name}
        spelled = json.dumps(arguments)
        index = len(self._content)
        self._content.append({**block, "input": arguments})
        self._characters += len(spelled)
        self._has_tools = True
        return [
            *events,
            named(
                {
                    "type": "content_block_start",
                    "index": index,
                    "content_block": {**block, "input": {}},
                }
            ),
            _delta(index, {"type": "input_json_delta", "partial_json": spelled}),
            named({"type": "content_block_stop", "index": index}),
        ]

    def finish(self) -> list[ModelEvent]:
        events = self._finish_block()
        ending = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        usage = {"output_tokens": tokens(self._characters)}
        return [
            *events,
            named({"type": "message_delta", "delta": ending, "usage": usage}),
            named({"type": "message_stop"}),
        ]

    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        return [named(error(0, kind, message))]

    def whole(self) -> dict[str, Any]:
        """Return the finished message."""
        assert self._open is BlockKind.NONE
        return {**self._envelope(content=self._content), "stop_reason": self._stop_reason()}

    def _continue(self, kind: BlockKind, block: dict[str, Any]) -> list[ModelEvent]:
        if self._open is kind:
            return []
        events = self._finish_block()
        self._open = kind
        return [
            *events,
            named(
                {"type": "content_block_start", "index": len(self._content), "content_block": block}
            ),
        ]

    def _say(self, delta: dict[str, Any], words: str) -> ModelEvent:
        self._pieces.append(words)
        self._characters += len(words)
        return _delta(len(self._content), delta)

    def _finish_block(self) -> list[ModelEvent]:
        index, words = len(self._content), "".join(self._pieces)
        stop = named({"type": "content_block_stop", "index": index})
        match self._open:
            case BlockKind.NONE:
                return []
            case BlockKind.TEXT:
                block, events = {"type": "text", "text": words}, [stop]
            case BlockKind.THINKING:
                block = {"type": "thinking", "thinking": words, "signature": SIGNATURE}
                events = [_delta(index, {"type": "signature_delta", "signature": SIGNATURE}), stop]
        self._content.append(block)
        self._open = BlockKind.NONE
        self._pieces.clear()
        return events

    def _stop_reason(self) -> str:
        return "tool_use" if self._has_tools else "end_turn"

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
                "output_tokens": tokens(self._characters),
            },
        }


def _delta(index: int, delta: dict[str, Any]) -> ModelEvent:
    return named({"type": "content_block_delta", "index": index, "delta": delta})


def error(_: int, kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


API = Api(
    name="anthropic",
    read=read,
    begin=AnthropicMessage,
    is_streamed=wants_stream,
    error=error,
    kinds=KINDS,
    kind="api_error",
    overflow=("invalid_request_error", "prompt is too long: 250000 tokens > 200000 maximum"),
)
