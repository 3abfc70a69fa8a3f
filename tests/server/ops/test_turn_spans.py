"""Spans from the events of a log: take-over, requeue, ids, and limits."""

from __future__ import annotations

import json
from typing import Any

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.log_dialect import reader_of
from banksman.core.session.event import Event, Project
from banksman.server.ops.turn_spans import CONTENT_CHARACTERS_MAX, TOOLS_MAX, TurnSpans

TURN = "t-0123456789abcdef"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
QUEUED = {"prompt": "x" * (CONTENT_CHARACTERS_MAX + 1), "trace": f"00-{TRACE}-00f067aa0ba902b7-01"}
ENDED = {"outcome": "done", "text": "yes", "used": {"tokens": {"input": 7, "output": 3, "cache_read": 1}}}


def call(id: str) -> bytes:
    block = {"type": "tool_use", "id": id, "name": "Bash", "input": {"command": "ls"}}
    return json.dumps({"type": "assistant", "message": {"content": [block]}}).encode()


def result(id: str) -> bytes:
    block = {"type": "tool_result", "tool_use_id": id, "content": "out"}
    return json.dumps({"type": "user", "message": {"content": [block]}}).encode()


def spans_of(*events: tuple[str, Any], has_content: bool = False, turn: str = TURN) -> TurnSpans:
    found = TurnSpans("s-1", "claude", "claude", turn, has_content)
    frames = reader_of(CLAUDE)
    for at, (kind, body) in enumerate(events, start=100):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        owner = None if kind == "process.adopted" else turn
        found.add(Event("s-1", 1, at, float(at), owner, kind, data, Project(frames.project, frames.partial)))
    return found


def test_taken_over_turn_has_a_span_for_each_host_linked_to_the_one_before() -> None:
    events: tuple[tuple[str, Any], ...] = (
        ("turn.queued", QUEUED),
        ("turn.started", {}),
        ("update", call("a")),
        ("process.adopted", {}),
        ("update", result("a")),
        ("update", call("b")),
        ("turn.ended", ENDED),
    )
    spans = spans_of(*events).spans()
    assert [span.name for span in spans] == [*["invoke_agent claude"] * 2, "queue", *["execute_tool Bash"] * 2]
    first, second, queue, a, b = spans
    # The agent has this id in its variable.
    assert first.id == TURN[2:]
    assert (first.start, first.end, second.start, second.end) == (100, 103, 103, 106)
    assert (first.parent, second.parent) == ("00f067aa0ba902b7",) * 2
    assert (first.continues, second.continues) == (None, first.id)
    assert (queue.start, queue.end, queue.parent) == (100, 101, first.id)
    assert (a.start, a.end, a.parent, a.error) == (102, 104, first.id, None)
    assert (b.start, b.end, b.parent, b.error) == (105, 106, second.id, "unfinished")
    assert second.attributes["gen_ai.usage.input_tokens"] == 7
    assert "gen_ai.usage.input_tokens" not in first.attributes
    assert len({span.id for span in spans}) == len(spans)
    # A second report of the same log is the same.
    assert spans_of(*events).spans() == spans


def test_requeued_turn_waits_until_its_last_start() -> None:
    events: tuple[tuple[str, Any], ...] = (
        ("turn.queued", QUEUED),
        ("turn.started", {}),
        ("turn.requeued", {}),
        ("turn.started", {}),
    )
    agent, queue = spans_of(*events, ("turn.ended", ENDED)).spans()
    assert (agent.start, queue.end) == (100, 103)


def test_ask_without_a_trace_begins_one() -> None:
    found = spans_of(("turn.queued", {"prompt": "hi"}), ("turn.ended", {"outcome": "withdrawn"}))
    agent, queue = found.spans()
    assert agent.parent is None
    assert len(found.context.trace) == 32
    # It was never sent: it waited until its end. That is no error.
    assert (queue.end, agent.error) == (101, None)
    assert spans_of(("turn.ended", ENDED)).spans()[0].parent is None


def test_content_is_cut_and_tools_are_bounded() -> None:
    calls = [("update", call(str(number))) for number in range(TOOLS_MAX + 2)]
    spans = spans_of(("turn.queued", QUEUED), *calls, ("turn.ended", ENDED), has_content=True).spans()
    assert len(spans) == TOOLS_MAX + 2
    assert spans[0].attributes["banksman.tools_omitted"] == 2
    assert len(str(spans[0].attributes["gen_ai.input.messages"])) == CONTENT_CHARACTERS_MAX
    assert spans[-1].attributes["gen_ai.tool.call.arguments"] == '{"command": "ls"}'


def test_frame_without_a_tool_is_not_decoded() -> None:
    class Counting:
        count = 0

        def __call__(self, _: bytes) -> list[dict[str, Any]]:
            Counting.count += 1
            return []

    found = TurnSpans("s-1", "claude", "claude", TURN)
    for seq, data in enumerate((b'{"type":"stream_event"}', b'{"type":"assistant"}', call("a")), start=1):
        found.add(Event("s-1", 1, seq, 0.0, TURN, "update", data, Project(Counting())))
    assert Counting.count == 1
