"""Partial text of a single frame in each dialect: its deltas, and no complete messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.core.dialects.recordings import corpus

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.log_dialect import UNKNOWN
from banksman.core.session.event import RECITED, SENT, UPDATE, Event, Project


def chunk(kind: str, text: str, message: str | None = None) -> dict[str, Any]:
    update: dict[str, Any] = {"sessionUpdate": kind, "content": {"type": "text", "text": text}}
    return update if message is None else {**update, "messageId": message}


def delta(of: dict[str, Any], parent: Any = None) -> bytes:
    event = {"type": "content_block_delta", "index": 0, "delta": of}
    return json.dumps({"type": "stream_event", "event": event, "parent_tool_use_id": parent}).encode()


def notice(method: str, **params: Any) -> bytes:
    return json.dumps({"method": method, "params": params}).encode()


SAID = [
    (CLAUDE, delta({"type": "text_delta", "text": " word"}), chunk("agent_message_chunk", " word")),
    (CLAUDE, delta({"type": "thinking_delta", "thinking": "hm"}), chunk("agent_thought_chunk", "hm")),
    (
        CODEX,
        notice("item/agentMessage/delta", itemId="i", delta=" word"),
        chunk("agent_message_chunk", " word", "i"),
    ),
    (
        CODEX,
        notice("item/reasoning/summaryTextDelta", itemId="i", delta="hm"),
        chunk("agent_thought_chunk", "hm", "i"),
    ),
]


@pytest.mark.parametrize(("dialect", "line", "update"), SAID)
def test_delta_is_partial_and_never_projected(dialect: Dialect, line: bytes, update: dict[str, Any]) -> None:
    assert dialect.partial(line) == [update]
    assert dialect.project(line) == []
    assert UNKNOWN.partial(line) == [update]


@pytest.mark.parametrize(
    "line",
    [
        delta({"type": "text_delta", "text": "of a subagent"}, parent="toolu_1"),
        delta({"type": "text_delta", "text": ""}),
        delta({"type": "text_delta", "text": 5}),
        delta({"type": "input_json_delta", "partial_json": "{"}),
        b'{"type":"stream_event","event":{"type":"message_start","message":{"id":"m"}}}',
        b'{"type":"stream_event","event":5}',
        b'{"type":"stream_event"}',
        b'{"type":"assistant","message":{"content":[{"type":"text","text":"whole"}]}}',
        b'{"type":"stream_event',
        b"\xff\x00",
        b"",
        b"5",
        notice("item/agentMessage/delta"),
        notice("item/completed", item={"id": "i", "type": "agentMessage", "text": "whole"}),
        b'{"jsonrpc":"2.0","method":"session/update","params":{"update":{"sessionUpdate":"agent_message_chunk"}}}',
    ],
)
def test_line_without_delta_has_no_partial(line: bytes) -> None:
    for dialect in (CLAUDE, CODEX, Acp(), UNKNOWN):
        assert dialect.partial(line) == []


def test_event_partial_is_only_for_updates() -> None:
    line = delta({"type": "text_delta", "text": "x"})
    project = Project(CLAUDE.project, CLAUDE.partial)
    for kind, told in ((UPDATE, [chunk("agent_message_chunk", "x")]), (SENT, []), (RECITED, [])):
        assert Event("s", 1, 1, 0.0, None, kind, line, project).partial == told
    assert Event("s", 1, 1, 0.0, None, UPDATE, line).partial == []
    assert Event("s", 1, 1, 0.0, None, UPDATE, line, Project(CLAUDE.project)).partial == []


def test_recorded_partial_texts_equal_streamed_ones() -> None:
    """They differ only in the message id, which comes in another frame."""
    found = 0
    for name in corpus.NAMES:
        projector = CLAUDE.projector()
        for line in corpus.lines(name):
            told = projector.project(line)
            if partial := CLAUDE.partial(line):
                found += 1
                assert [{k: v for k, v in update.items() if k != "messageId"} for update in told] == partial
    assert found > 10
