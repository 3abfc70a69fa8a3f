"""Projection of Codex items for readers: items that the recordings do not contain, and hostile ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banksman.core.dialects.codex import CODEX


def notice(method: str, **params: Any) -> bytes:
    return json.dumps({"method": method, "params": {"threadId": "t", "turnId": "u", **params}}).encode()


def started(**item: Any) -> list[dict[str, Any]]:
    return CODEX.project(notice("item/started", item={"id": "i", **item}))


def completed(**item: Any) -> list[dict[str, Any]]:
    return CODEX.project(notice("item/completed", item={"id": "i", **item}))


def chunk(kind: str, text: str) -> dict[str, Any]:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}, "messageId": "i"}


def test_project_tells_command_and_its_output() -> None:
    (began,) = started(type="commandExecution", command="ls", cwd="/srv", status="inProgress")
    assert (began["kind"], began["title"], began["rawInput"]) == ("execute", "ls", {"command": "ls", "cwd": "/srv"})
    (ended,) = completed(type="commandExecution", status="failed", aggregatedOutput="no\n", exitCode=2)
    assert ended == {
        "sessionUpdate": "tool_call_update",
        "toolCallId": "i",
        "status": "failed",
        "content": [{"type": "content", "content": {"type": "text", "text": "no\n"}}],
        "rawOutput": {"exitCode": 2},
    }
    assert completed(type="commandExecution", status="declined")[0]["status"] == "failed"
    assert completed(type="commandExecution", status="completed")[0]["status"] == "completed"


def test_project_tells_file_changes_as_diffs() -> None:
    diff = "--- a\n+++ b\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n\\ No newline at end of file\n"
    changes = [
        {"path": "a.py", "kind": {"type": "update", "move_path": None}, "diff": diff},
        {"path": "b.py", "kind": {"type": "add"}, "diff": "new\n"},
        {"path": "c.py", "kind": {"type": "delete"}, "diff": "old\n"},
        {"path": 7},
        "nonsense",
    ]
    (began,) = started(type="fileChange", changes=changes, status="inProgress")
    assert (began["kind"], began["title"]) == ("edit", "Edit a.py, b.py, c.py")
    assert began["content"] == [
        {"type": "diff", "path": "a.py", "oldText": "one\ntwo\nthree\n", "newText": "one\n2\nthree\n"},
        {"type": "diff", "path": "b.py", "oldText": None, "newText": "new\n"},
        {"type": "diff", "path": "c.py", "oldText": "old\n", "newText": ""},
    ]


def test_project_tells_other_tools() -> None:
    (call,) = started(type="mcpToolCall", server="files", tool="read", arguments={"a": 1}, status="inProgress")
    assert (call["title"], call["kind"]) == ("files: read", "other")
    parts = [{"type": "text", "text": "x"}, {"type": "odd"}]
    (ended,) = completed(type="mcpToolCall", status="completed", result={"content": parts})
    assert ended["content"] == [{"type": "content", "content": parts[0]}]
    (ended,) = completed(type="mcpToolCall", status="failed", error={"message": "gone"})
    assert (ended["status"], ended["content"][0]["content"]["text"]) == ("failed", "gone")
    assert started(type="webSearch", query="why", action={"type": "search"})[0]["kind"] == "search"
    assert started(type="webSearch", query="why", action={"type": "openPage"})[0]["kind"] == "fetch"
    assert started(type="contextCompaction") == []


def test_project_tells_plans_and_usage() -> None:
    steps = [
        *(
            {"step": "a", "status": "completed"},
            {"step": "b", "status": "inProgress"},
            {"step": "c", "status": "pending"},
        ),
        {"step": 7},
    ]
    (plan,) = CODEX.project(notice("turn/plan/updated", plan=steps))
    assert [(entry["content"], entry["status"]) for entry in plan["entries"]] == [
        *(("a", "completed"), ("b", "in_progress"), ("c", "pending")),
    ]
    usage = {"total": {"totalTokens": 90}, "last": {"totalTokens": 15}, "modelContextWindow": 200}
    assert CODEX.project(notice("thread/tokenUsage/updated", tokenUsage=usage)) == [
        {"sessionUpdate": "usage_update", "used": 15, "size": 200}
    ]


def test_project_tells_thoughts_once() -> None:
    complete = notice("item/completed", item={"type": "reasoning", "id": "i", "summary": ["hm"], "content": ["so"]})
    thoughts = [chunk("agent_thought_chunk", "hm"), chunk("agent_thought_chunk", "so")]
    assert CODEX.project(complete) == thoughts
    assert CODEX.projector().project(complete) == thoughts, "where there were no deltas"
    projector = CODEX.projector()
    deltas = [
        notice("item/reasoning/summaryTextDelta", itemId="i", delta="hm"),
        notice("item/reasoning/textDelta", itemId="i", delta="so"),
    ]
    assert [update for line in deltas for update in projector.project(line)] == thoughts
    assert projector.project(complete) == []
    assert [CODEX.project(line) for line in deltas] == [[], []]


def test_transcript_keeps_text_of_cut_off_turn() -> None:
    transcript = CODEX.transcript()
    assert transcript.text() is None
    transcript.add(notice("item/agentMessage/delta", itemId="i", delta="fir"))
    transcript.add(notice("item/completed", item={"type": "agentMessage", "id": "i", "text": "first. "}))
    transcript.add(notice("item/reasoning/textDelta", itemId="k", delta="hm"))
    transcript.add(notice("item/agentMessage/delta", itemId="j", delta="sec"))
    transcript.add(notice("item/agentMessage/delta", itemId="j", delta="ond"))
    assert transcript.text() == "first. second"


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"x", b"[]", b"7", b"{}", b'{"method":7}', b'{"method":"item/started"}', b"\xff"),
        *(b'{"method":"item/started","params":[]}', b'{"method":"item/started","params":{"item":[]}}'),
        *(b'{"method":"item/completed","params":{"item":{"id":7,"type":"commandExecution"}}}',),
        *(b'{"method":"item/completed","params":{"item":{"id":"i","type":{}}}}',),
    ],
    ids=repr,
)
def test_project_tells_nothing_for_invalid_line(line: bytes) -> None:
    transcript = CODEX.transcript()
    transcript.add(line)
    assert (CODEX.project(line), CODEX.projector().project(line), transcript.text()) == ([], [], None)


def test_project_mends_text_that_is_not_utf8() -> None:
    line = b'{"method":"item/completed","params":{"item":{"id":"i","type":"agentMessage","text":"a\xff"}}}'
    assert CODEX.project(line) == [chunk("agent_message_chunk", "a\ufffd")]
