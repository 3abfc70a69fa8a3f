"""Encode a conversation and decode a reply in each model API, for tests that apply to all of them.

The formats follow the requests that the agents send and the replies that they accept, not the server's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.testing.model_client import Client, Json

# One entry of a conversation: ("user", text), ("model", text), ("call", name) or ("result", text).
Turn = tuple[str, str]


@dataclass(slots=True)
class Said:
    """A reply as a client decodes it."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list[tuple[str, Json]])
    ids: set[str] = field(default_factory=set[str])
    # The stop reason, in the API's own word.
    end: str | None = None
    tokens: tuple[int, int] = (0, 0)

    def call(self, identity: str, name: str, arguments: Any) -> None:
        self.ids.add(identity)
        self.calls.append((name, json.loads(arguments) if isinstance(arguments, str) else arguments))

    def same(self) -> tuple[object, ...]:
        """All fields except the ids, which are new each time."""
        return (self.text, self.thought, self.calls, len(self.ids), self.end, self.tokens)


@dataclass(frozen=True, slots=True)
class Spelling:
    """One model API."""

    name: str
    path: Callable[[bool], str]
    body: Callable[[list[Turn]], Json]
    whole: Callable[[Json], Said]
    stream: Callable[[Client], Said]
    # The word for an error of each status, and how to read it from an error's body.
    kind: Callable[[Json], str]
    kinds: dict[int, str]
    ends: tuple[str, str]

    def send(self, client: Client, *turns: Turn, stream: bool = True, has_tools: bool = True) -> None:
        body = self.body(list(turns))
        if self.name != "gemini":
            body["stream"] = stream
        if not has_tools:
            del body["tools"]
        client.send("POST", self.path(stream), body)

    def ask(self, client: Client, *turns: Turn, stream: bool = True) -> Said:
        self.send(client, *turns, stream=stream)
        if not stream:
            status, answer = client.answer()
            assert status == 200
            return self.whole(answer)
        assert client.head() == 200
        return self.stream(client)


# ── Anthropic's Messages ──


def _anthropic_body(turns: list[Turn]) -> Json:
    def message(kind: str, text: str) -> Json:
        match kind:
            case "user":
                return {"role": "user", "content": text}
            case "model":
                return {"role": "assistant", "content": [{"type": "text", "text": text}]}
            case "call":
                block: Json = {"type": "tool_use", "id": "1", "name": text, "input": {}}
                return {"role": "assistant", "content": [block]}
            case _:
                return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": text}]}

    return {"model": "m", "tools": [{"name": "run"}], "messages": [message(*turn) for turn in turns]}


def _anthropic_whole(answer: Json) -> Said:
    said = Said(end=answer["stop_reason"])
    for block in answer["content"]:
        said.text += block.get("text", "")
        said.thought += block.get("thinking", "")
        if block["type"] == "tool_use":
            said.call(block["id"], block["name"], block["input"])
    said.tokens = (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"])
    return said


def _anthropic_stream(client: Client) -> Said:
    said, name, identity, inputs = Said(), "", "", 0
    for event in client.events():
        match event:
            case {"type": "message_start", "message": {"usage": usage}}:
                inputs = usage["input_tokens"]
            case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
                name, identity = block["name"], block["id"]
            case {"type": "content_block_delta", "delta": delta}:
                said.text += delta.get("text", "")
                said.thought += delta.get("thinking", "")
                if "partial_json" in delta:
                    said.call(identity, name, delta["partial_json"])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                said.end, said.tokens = delta["stop_reason"], (inputs, usage["output_tokens"])
            case _:
                pass
    return said


# ── OpenAI's Responses ──


def _responses_body(turns: list[Turn]) -> Json:
    def item(kind: str, text: str) -> Json:
        match kind:
            case "user":
                return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
            case "model":
                return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            case "call":
                return {"type": "function_call", "call_id": "1", "name": text, "arguments": "{}"}
            case _:
                return {"type": "function_call_output", "call_id": "1", "output": text}

    return {"model": "m", "tools": [{"type": "function", "name": "run"}], "input": [item(*turn) for turn in turns]}


def _responses_whole(response: Json) -> Said:
    said = Said(end=response["status"])
    for item in response["output"]:
        assert item["status"] == "completed"
        match item["type"]:
            case "message":
                said.text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                said.thought += "".join(part["text"] for part in item["summary"])
            case _:
                said.call(item["call_id"], item["name"], item["arguments"])
    said.tokens = (response["usage"]["input_tokens"], response["usage"]["output_tokens"])
    return said


def _responses_stream(client: Client) -> Said:
    said, deltas = Said(), Said()
    for number, event in enumerate(client.events()):
        assert event["sequence_number"] == number
        match event["type"]:
            case "response.output_text.delta":
                deltas.text += event["delta"]
            case "response.reasoning_summary_text.delta":
                deltas.thought += event["delta"]
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                deltas.call(item["call_id"], item["name"], item["arguments"])
            case "response.completed":
                said = _responses_whole(event["response"])
            case _:
                pass
    # The text comes three times: in pieces, by item, and at the end.
    assert (said.text, said.thought, said.calls) == (deltas.text, deltas.thought, deltas.calls)
    return said


# ── OpenAI's chat completions ──


def _chat_body(turns: list[Turn]) -> Json:
    def message(kind: str, text: str) -> Json:
        match kind:
            case "user":
                return {"role": "user", "content": text}
            case "model":
                return {"role": "assistant", "content": text}
            case "call":
                call = {"id": "1", "type": "function", "function": {"name": text, "arguments": "{}"}}
                return {"role": "assistant", "content": None, "tool_calls": [call]}
            case _:
                return {"role": "tool", "tool_call_id": "1", "content": text}

    tools = [{"type": "function", "function": {"name": "run"}}]
    messages = [{"role": "system", "content": "@@ -1,2 +1,2 @@\n is no directive"}, *(message(*turn) for turn in turns)]
    return {"model": "m", "tools": tools, "messages": messages, "stream_options": {"include_usage": True}}


def _chat_whole(answer: Json) -> Said:
    (choice,), usage = answer["choices"], answer["usage"]
    message = choice["message"]
    said = Said(message["content"] or "", message.get("reasoning_content", ""), end=choice["finish_reason"])
    for call in message.get("tool_calls", ()):
        said.call(call["id"], call["function"]["name"], call["function"]["arguments"])
    said.tokens = (usage["prompt_tokens"], usage["completion_tokens"])
    return said


def _chat_stream(client: Client) -> Said:
    said, calls = Said(), dict[int, list[str]]()
    *chunks, last = client.chunks()
    assert last == "[DONE]"
    for chunk in chunks:
        assert isinstance(chunk, dict)
        if "usage" in chunk:
            said.tokens = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            said.end = choice["finish_reason"] or said.end
            said.text += choice["delta"].get("content", "")
            said.thought += choice["delta"].get("reasoning_content", "")
            for call in choice["delta"].get("tool_calls", ()):
                pieces = calls.setdefault(call["index"], [call.get("id"), call["function"].get("name")])
                pieces.append(call["function"]["arguments"])
    for identity, name, *pieces in calls.values():
        said.call(identity, name, "".join(pieces))
    return said


# ── Gemini's generateContent ──


def _gemini_body(turns: list[Turn]) -> Json:
    def content(kind: str, text: str) -> Json:
        match kind:
            case "user":
                return {"role": "user", "parts": [{"text": text}]}
            case "model":
                return {"role": "model", "parts": [{"text": text}]}
            case "call":
                return {"role": "model", "parts": [{"functionCall": {"name": text, "args": {}}}]}
            case _:
                response = {"name": "run", "response": {"output": text}}
                return {"role": "user", "parts": [{"functionResponse": response}]}

    tools = [{"functionDeclarations": [{"name": "run"}]}]
    return {"tools": tools, "contents": [content(*turn) for turn in turns]}


def _gemini_answers(answers: Iterable[Json]) -> Said:
    said = Said()
    for answer in answers:
        (candidate,) = answer["candidates"]
        said.end = candidate.get("finishReason", said.end)
        usage = answer["usageMetadata"]
        said.tokens = (usage["promptTokenCount"], usage["candidatesTokenCount"])
        for part in candidate["content"]["parts"]:
            if "functionCall" in part:
                call = part["functionCall"]
                said.call(call["id"], call["name"], call["args"])
            elif part.get("thought"):
                said.thought += part["text"]
            else:
                said.text += part["text"]
    return said


def _gemini_stream(client: Client) -> Said:
    return _gemini_answers(chunk for chunk in client.chunks() if isinstance(chunk, dict))


OPENAI_KINDS = {400: "invalid_request_error", 429: "rate_limit_exceeded", 500: "server_error", 502: "server_error"}

SPELLINGS = {
    spelling.name: spelling
    for spelling in (
        Spelling(
            "anthropic",
            lambda _: "/v1/messages?beta=true",
            _anthropic_body,
            _anthropic_whole,
            _anthropic_stream,
            lambda body: body["error"]["type"],
            {400: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 502: "api_error"},
            ("end_turn", "tool_use"),
        ),
        Spelling(
            "responses",
            lambda _: "/v1/responses",
            _responses_body,
            _responses_whole,
            _responses_stream,
            lambda body: body["error"]["code"],
            OPENAI_KINDS,
            ("completed", "completed"),
        ),
        Spelling(
            "chat",
            lambda _: "/v1/chat/completions",
            _chat_body,
            _chat_whole,
            _chat_stream,
            lambda body: body["error"]["code"],
            OPENAI_KINDS,
            ("stop", "tool_calls"),
        ),
        Spelling(
            "gemini",
            lambda stream: f"/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}",
            _gemini_body,
            lambda answer: _gemini_answers([answer]),
            _gemini_stream,
            lambda body: body["error"]["status"],
            {400: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 502: "UNKNOWN"},
            ("STOP", "STOP"),
        ),
    )
}
