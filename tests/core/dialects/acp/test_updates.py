"""Projection of an ACP agent's frames for readers, and the text that is the answer of a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banksman.core.dialects.acp import Acp, updates
from banksman.core.wire import jsonrpc


def frame(kind: Any, session: Any = "s-1", **members: Any) -> bytes:
    update = {"sessionUpdate": kind, **members}
    return json.dumps({"method": "session/update", "params": {"sessionId": session, "update": update}}).encode()


def chunk(text: Any, message: str | None = None, session: str = "s-1") -> bytes:
    named = {} if message is None else {"messageId": message}
    return frame("agent_message_chunk", session, content={"type": "text", "text": text}, **named)


def answer(*lines: bytes) -> str | None:
    transcript = Acp().transcript()
    for line in lines:
        transcript.add(line)
    return transcript.text()


def test_update_is_projected_unchanged_whatever_its_kind() -> None:
    line = frame("of a new kind", whatever={"a": [1, None]}, _meta=None)
    assert Acp().project(line) == [{"sessionUpdate": "of a new kind", "whatever": {"a": [1, None]}, "_meta": None}]
    batch = b"[%s,5,%s]" % (chunk("a"), chunk("b"))
    assert [update["content"]["text"] for update in Acp().projector().project(batch)] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage",
        b"[]",
        b"5",
        b'{"method":"session/update"}',
        b'{"method":"session/update","params":5}',
        b'{"method":"session/update","params":{"update":[]}}',
        b'{"method":"session/other","params":{"update":{"sessionUpdate":"plan"}}}',
        b'{"id":3,"result":{"stopReason":"end_turn","usage":{"totalTokens":7}}}',
        b'{"type":"banksman.spilled","bytes":5}',
        frame(None),
        frame(5),
    ],
)
def test_line_without_update_projects_to_nothing(line: bytes) -> None:
    assert Acp().project(line) == []
    assert answer(line) is None


def test_answer_is_text_after_last_tool_began() -> None:
    began = frame("tool_call", toolCallId="t", status="pending")
    ended = frame("tool_call_update", toolCallId="t", status="completed")
    assert answer(chunk("Looking."), began, ended, chunk("It "), chunk("works.")) == "It works."
    # An update about the same tool does not end the message that the agent is sending.
    assert answer(began, chunk("It "), ended, chunk("works.")) == "It works."
    # One agent first reports a tool that needed permission when the tool has ended.
    assert answer(chunk("Looking."), ended, chunk("It works.")) == "It works."
    # A turn may end with a tool, without text after it.
    assert answer(chunk("Looking."), began, ended) == "Looking."
    assert answer(began, ended) is None


def test_answer_tells_messages_with_ids_apart() -> None:
    assert answer(chunk("a", "m1"), chunk("b", "m1"), chunk("c", "m2"), chunk("d", "m2")) == "cd"
    assert answer(chunk("Warning."), chunk("answer", "m1")) == "answer"


def test_answer_ignores_thoughts_empty_chunks_and_images() -> None:
    thought = frame("agent_thought_chunk", content={"type": "text", "text": "hm"})
    picture = frame("agent_message_chunk", content={"type": "image", "data": "AA=="})
    assert answer(chunk("a"), thought, chunk(""), picture, chunk(5), frame("agent_message_chunk"), chunk("b")) == "ab"


def test_answer_ignores_text_of_subagent() -> None:
    assert answer(chunk("a"), chunk("from below", session="s-2"), chunk("b")) == "ab"


def test_answer_keeps_end_of_long_message() -> None:
    piece = "x" * (updates.SAID_CHARACTERS_MAX // 4)
    text = answer(chunk("the beginning"), *[chunk(piece)] * 5, chunk("the end"))
    assert text is not None
    assert "the beginning" not in text
    assert text.endswith("the end")
    assert updates.SAID_CHARACTERS_MAX <= len(text) <= updates.SAID_CHARACTERS_MAX + len(piece)


def test_batch_projection_is_bounded() -> None:
    many = b"[%s]" % b",".join([chunk("a")] * jsonrpc.BATCH_MAX)
    assert len(Acp().project(many)) == jsonrpc.BATCH_MAX
    assert Acp().project(many[:-1] + b",5]") == []
