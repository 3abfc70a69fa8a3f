"""OpenAI's Chat Completions API in the fake model: read requests, build replies and errors.

The clients are opencode, Qwen Code and Copilot. `read` is pure, `ChatMessage` is the reply under
construction, and neither does I/O. `responses.py` shares the errors. The API has no standard for
thoughts; `reasoning_content` is the de facto convention.
"""

from __future__ import annotations

import json
import time
from typing import Any

from banksman.testing.fake_model.apis import (
    Api,
    BadRequest,
    Body,
    Entry,
    ModelCall,
    ModelEvent,
    Who,
    new_id,
    objects,
    texts,
    tokens,
    unnamed,
    wants_stream,
)

MODEL = "gpt-fake-1"
DONE = ModelEvent("[DONE]")
# The two APIs of OpenAI share their error format.
KINDS = {
    400: "invalid_request_error",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "server_is_overloaded",
}
KIND = "server_error"
OVERFLOW = (
    "context_length_exceeded",
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
)


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    whose = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": whose, "param": None, "code": kind}}


def read(body: Body) -> list[Entry]:
    messages = objects(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages: at least one message is required")
    return [entry for message in messages if (entry := _entry(message)) is not None]


def _entry(message: dict[str, Any]) -> Entry | None:
    match message.get("role"):
        case "assistant":
            return Entry(Who.MODEL)
        case "tool" | "function":
            return Entry(Who.USER, has_result=True)
        case "user":
            return Entry(Who.USER, texts(message.get("content"), "messages: content"))
        case _:
            return None  # Instructions of the agent.


class ChatMessage:
    """Reply under construction, in the format of Chat Completions."""

    def __init__(self, call: ModelCall) -> None:
        self._model = call.model(MODEL)
        self._id = new_id("chatcmpl")
        self._input_tokens = call.input_tokens
        self._created = int(time.time())
        self._shows_usage = call.body.get("stream_options") == {"include_usage": True}
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._characters = 0

    @property
    def is_empty(self) -> bool:
        return not (self._texts or self._thoughts or self._calls)

    def start(self) -> list[ModelEvent]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def text(self, words: str) -> list[ModelEvent]:
        self._texts.append(words)
        self._characters += len(words)
        return [self._chunk({"content": words})]

    def think(self, words: str) -> list[ModelEvent]:
        self._thoughts.append(words)
        self._characters += len(words)
        return [self._chunk({"reasoning_content": words})]

    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]:
        spelled = json.dumps(arguments)
        call = {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": name, "arguments": spelled},
        }
        index = len(self._calls)
        self._calls.append(call)
        self._characters += len(spelled)
        begun = {**call, "function": {"name": name, "arguments": ""}}
        return [
            self._chunk({"tool_calls": [{"index": index, **begun}]}),
            self._chunk({"tool_calls": [{"index": index, "function": {"arguments": spelled}}]}),
        ]

    def finish(self) -> list[ModelEvent]:
        events = [self._chunk({}, self._finish_reason())]
        if self._shows_usage:
            events.append(
                unnamed(
                    {
                        **self._envelope("chat.completion.chunk"),
                        "choices": [],
                        "usage": self._usage(),
                    }
                )
            )
        return [*events, DONE]

    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        return [unnamed(error(500, kind, message))]

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._texts) if self._texts else None,
        }
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason()}
        return {**self._envelope("chat.completion"), "choices": [choice], "usage": self._usage()}

    def _finish_reason(self) -> str:
        return "tool_calls" if self._calls else "stop"

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> ModelEvent:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return unnamed({**self._envelope("chat.completion.chunk"), "choices": [choice]})

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self) -> dict[str, int]:
        output_tokens = tokens(self._characters)
        return {
            "prompt_tokens": self._input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self._input_tokens + output_tokens,
        }


API = Api(
    name="chat",
    read=read,
    begin=ChatMessage,
    is_streamed=wants_stream,
    error=error,
    kinds=KINDS,
    kind=KIND,
    overflow=OVERFLOW,
)
