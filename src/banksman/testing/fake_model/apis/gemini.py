"""Google's generateContent APIs in the fake model: read requests of Gemini CLI, build replies.

`read` is pure, `GeminiMessage` is the reply under construction, and neither does I/O. The path
contains the model and says whether to stream (streamGenerateContent). A stream is a sequence of
complete answers, each with the next parts, and has no opening event. The agent's text about its
working directory is beside the first prompt, framed by a tag: `play.py` skips it.
"""

from __future__ import annotations

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
    new_id,
    objects,
    tokens,
    unnamed,
)

# The agent stores it and sends it back with the part. The agent cannot verify it, because only the
# vendor has the key.
SIGNATURE = "ZmFrZSBzaWduYXR1cmU="
KINDS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
OVERFLOW = (
    "INVALID_ARGUMENT",
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
)


def read(body: Body) -> list[Entry]:
    contents = objects(body.get("contents"), "contents")
    if not contents:
        raise BadRequest("contents: at least one content is required")
    return [_entry(content) for content in contents]


def _entry(content: dict[str, Any]) -> Entry:
    if content.get("role") == "model":
        return Entry(Who.MODEL)
    parts = objects(content.get("parts"), "contents: parts")
    said = (part.get("text") for part in parts)
    has_result = any("functionResponse" in part for part in parts)
    return Entry(Who.USER, tuple(text for text in said if isinstance(text, str)), has_result)


class GeminiMessage:
    """Reply under construction, in the format of generateContent."""

    def __init__(self, call: ModelCall) -> None:
        self._model = call.path.rpartition("/")[2].partition(":")[0]
        self._id = new_id("response")
        self._input_tokens = call.input_tokens
        self._parts: list[dict[str, Any]] = []
        self._characters = 0

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def start(self) -> list[ModelEvent]:
        return []

    def text(self, words: str) -> list[ModelEvent]:
        return self._say({"text": words}, len(words))

    def think(self, words: str) -> list[ModelEvent]:
        return self._say({"text": words, "thought": True}, len(words))

    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]:
        call = {"id": new_id("call"), "name": name, "args": arguments}
        return self._say(
            {"functionCall": call, "thoughtSignature": SIGNATURE}, len(json.dumps(arguments))
        )

    def finish(self) -> list[ModelEvent]:
        return [unnamed(self._answer([{"text": ""}], "STOP"))]

    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        return [unnamed(error(API.status_of(kind), kind, message))]

    def whole(self) -> dict[str, Any]:
        # The parts stay separate: every client joins them.
        return self._answer(self._parts, "STOP")

    def _say(self, part: dict[str, Any], characters: int) -> list[ModelEvent]:
        self._parts.append(part)
        self._characters += characters
        return [unnamed(self._answer([part], None))]

    def _answer(self, parts: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        if finish_reason is not None:
            candidate["finishReason"] = finish_reason
        output_tokens = tokens(self._characters)
        usage = {
            "promptTokenCount": self._input_tokens,
            "candidatesTokenCount": output_tokens,
            "totalTokenCount": self._input_tokens + output_tokens,
        }
        return {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": self._model,
            "responseId": self._id,
        }


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "status": kind}}


API = Api(
    name="gemini",
    read=read,
    begin=GeminiMessage,
    is_streamed=lambda call: call.path.endswith(":streamGenerateContent"),
    error=error,
    kinds=KINDS,
    kind="UNKNOWN",
    overflow=OVERFLOW,
)
