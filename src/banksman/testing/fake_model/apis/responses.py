"""OpenAI's Responses API in the fake model: read requests of Codex, build replies.

`read` is pure, `ResponsesMessage` is the reply under construction, and neither does I/O. A
conversation is one flat list of items: messages, tool calls, tool results, reasoning. The agent
writes its instructions in messages of the role "developer". Their text has lines of patches that
begin with the mark `@@`. These lines are not directives, so this module skips such messages. Text
that the agent writes in the name of the user (working directory, an aborted turn) is framed by a
tag: `play.py` skips it. A prompt that arrives while the agent works is an ordinary user message.
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
    chat,
    named,
    new_id,
    objects,
    texts,
    tokens,
    wants_stream,
)

MODEL = "gpt-fake-1"
# Suffix of the types of tool results. All other types except messages come from the model.
OUTPUT = "_output"


def read(body: Body) -> list[Entry]:
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
    )
    if not items:
        raise BadRequest("input: at least one item is required")
    return [entry for item in items if (entry := _entry(item)) is not None]


def _entry(item: dict[str, Any]) -> Entry | None:
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise BadRequest("input: the type of an item is a string")
    if kind.endswith(OUTPUT):
        return Entry(Who.USER, has_result=True)
    if kind != "message" or item.get("role") == "assistant":
        return Entry(Who.MODEL)
    return (
        Entry(Who.USER, texts(item.get("content"), "input: content"))
        if item.get("role") == "user"
        else None
    )


class ResponsesMessage:
    """Reply under construction, in the format of the Responses API."""

    def __init__(self, call: ModelCall) -> None:
        self._model = call.model(MODEL)
        self._id = new_id("resp")
        self._input_tokens = call.input_tokens
        self._created = int(time.time())
        # Finished items, and the text pieces of the open item, which are joined once, when it ends.
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._characters = 0
        self._event_count = 0

    @property
    def is_empty(self) -> bool:
        return not self._items and self._open is None

    def start(self) -> list[ModelEvent]:
        response = self._response("in_progress")
        return [
            self._event(f"response.{word}", response=response)
            for word in ("created", "in_progress")
        ]

    def text(self, words: str) -> list[ModelEvent]:
        begun = self._continue("message", {"id": new_id("msg"), "role": "assistant", "content": []})
        part = _text_part("")
        events = (
            [*begun, self._in_item("content_part.added", content_index=0, part=part)]
            if begun
            else []
        )
        return [*events, self._say("output_text.delta", words, content_index=0)]

    def think(self, words: str) -> list[ModelEvent]:
        begun = self._continue("reasoning", {"id": new_id("rs"), "summary": []})
        part = _thought_part("")
        events = (
            [*begun, self._in_item("reasoning_summary_part.added", summary_index=0, part=part)]
            if begun
            else []
        )
        return [*events, self._say("reasoning_summary_text.delta", words, summary_index=0)]

    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]:
        events = self._finish_item()
        spelled = json.dumps(arguments)
        item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": new_id("call"),
            "name": name,
        }
        index = len(self._items)
        self._items.append({**item, "arguments": spelled, "status": "completed"})
        self._characters += len(spelled)
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": index}
        return [
            *events,
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **where, delta=spelled),
            self._event("response.function_call_arguments.done", **where, arguments=spelled),
            self._event("response.output_item.done", output_index=index, item=self._items[index]),
        ]

    def finish(self) -> list[ModelEvent]:
        events = self._finish_item()
        return [*events, self._event("response.completed", response=self._response("completed"))]

    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        response = {**self._response("failed"), "error": {"code": kind, "message": message}}
        return [self._event("response.failed", response=response)]

    def whole(self) -> dict[str, Any]:
        """Return the finished response."""
        assert self._open is None
        return self._response("completed")

    def _continue(self, kind: str, fields: dict[str, Any]) -> list[ModelEvent]:
        """Open an item, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._finish_item()
        self._open = {"type": kind, **fields, "status": "in_progress"}
        return [
            *events,
            self._event(
                "response.output_item.added", output_index=len(self._items), item=self._open
            ),
        ]

    def _say(self, what: str, words: str, **where: int) -> ModelEvent:
        self._pieces.append(words)
        self._characters += len(words)
        return self._in_item(what, **where, delta=words)

    def _finish_item(self) -> list[ModelEvent]:
        item, words = self._open, "".join(self._pieces)
        if item is None:
            return []
        if item["type"] == "message":
            part = _text_part(words)
            whole, name, field, where = (
                "content",
                "output_text",
                "content_part",
                {"content_index": 0},
            )
        else:
            part = _thought_part(words)
            whole, name, field, where = (
                "summary",
                "reasoning_summary_text",
                "reasoning_summary_part",
                {"summary_index": 0},
            )
        events = [
            self._in_item(f"{name}.done", **where, text=words),
            self._in_item(f"{field}.done", **where, part=part),
        ]
        finished = {**item, whole: [part], "status": "completed"}
        events.append(
            self._event("response.output_item.done", output_index=len(self._items), item=finished)
        )
        self._items.append(finished)
        self._open = None
        self._pieces.clear()
        return events

    def _in_item(self, what: str, **fields: Any) -> ModelEvent:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(f"response.{what}", **where, **fields)

    def _event(self, kind: str, **fields: Any) -> ModelEvent:
        self._event_count += 1
        return named({"type": kind, "sequence_number": self._event_count - 1, **fields})

    def _response(self, status: str) -> dict[str, Any]:
        output_tokens = tokens(self._characters)
        usage = {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._input_tokens + output_tokens,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": self._items,
            "error": None,
            "incomplete_details": None,
            "usage": usage if status == "completed" else None,
        }


def _text_part(words: str) -> dict[str, Any]:
    return {"type": "output_text", "text": words, "annotations": []}


def _thought_part(words: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": words}


def compacted(call: ModelCall) -> dict[str, Any]:
    """Return the answer of `/v1/responses/compact`: a short replacement for a long conversation."""
    message = ResponsesMessage(call)
    message.text("ok")
    message.finish()
    return {**message.whole(), "object": "response.compaction"}


API = Api(
    name="responses",
    read=read,
    begin=ResponsesMessage,
    is_streamed=wants_stream,
    error=chat.error,
    kinds=chat.KINDS,
    kind=chat.KIND,
    overflow=chat.OVERFLOW,
)
