"""Codex frames as ACP session updates for readers, and the text of a turn.

`project` and `partial` translate one frame. `CodexProjector` translates the frames of a turn in
order. `CodexTranscript` collects the text of a turn, including an unfinished message.

**Each text appears once.** The agent sends a text in deltas while the model writes, and again in
the completed item. Two projections exist, and each emits everything once:

- `project` sees one frame and emits the completed item.
- `CodexProjector` gets the frames of a turn from its beginning. It emits the deltas as they arrive,
  and a completed item only if the item had no deltas.

`partial` serves a reader of `project` that shows a text while it grows. It emits one delta, and the
completed item repeats the text.

**Tools** are items too. `item/started` is the call, and `item/completed` is its end with the
output. Output deltas are dropped: an update of a call replaces its content, and the completed item
has the whole output.
"""

from __future__ import annotations

from typing import Any

import msgspec

from banksman.core.wire.partial_json import UNDECODABLE, count, decoded, items, mapping, text

Update = dict[str, Any]

TITLE_CHARACTERS_MAX = 200
# Maximum characters kept of a turn that ended without an answer. The end is kept, for a person to
# read.
SAID_CHARACTERS_MAX = 1 << 20

_MESSAGE, _THOUGHT = "agent_message_chunk", "agent_thought_chunk"
# Deltas that carry text, and the kind of text.
_DELTAS = {
    "item/agentMessage/delta": _MESSAGE,
    "item/plan/delta": _MESSAGE,
    "item/reasoning/summaryTextDelta": _THOUGHT,
    "item/reasoning/textDelta": _THOUGHT,
}
# ACP tool kinds by item type. An item type that is missing here is no tool.
_KINDS = {
    "commandExecution": "execute",
    "fileChange": "edit",
    "mcpToolCall": "other",
    "dynamicToolCall": "other",
    "collabAgentToolCall": "think",
    "webSearch": "search",
    "imageView": "read",
    "imageGeneration": "other",
}
# Item members that hold the input of a tool.
_GIVEN = (
    "command",
    "cwd",
    "changes",
    "server",
    "tool",
    "arguments",
    "query",
    "action",
    "path",
    "prompt",
)


def project(line: bytes) -> list[Update]:
    """Translate a frame to session updates: none, one or several. Never raises."""
    method = _method(line)
    if method not in _PROJECTED:
        return []
    params = mapping(mapping(decoded(line)).get("params"))
    match method:
        case "item/started":
            return _began(mapping(params.get("item")))
        case "item/completed":
            return _completed(mapping(params.get("item")))
        case "turn/plan/updated":
            return _plan(params)
        case _:
            return _usage(mapping(params.get("tokenUsage")))


_PROJECTED = frozenset(
    ("item/started", "item/completed", "turn/plan/updated", "thread/tokenUsage/updated")
)


class _Named(msgspec.Struct, gc=False):
    method: str = ""


_decode = msgspec.json.Decoder(_Named).decode


def _method(line: bytes) -> str:
    """Decode only the method of a frame, because most frames of any turn are deltas."""
    try:
        return _decode(line).method
    except UNDECODABLE:
        # A line with invalid UTF-8 may be repaired by `decoded`. A line that is no message has no
        # method.
        return text(mapping(decoded(line)).get("method")) or ""


def partial(line: bytes) -> list[Update]:
    """Translate one delta of an unfinished text. Never raises."""
    kind = _DELTAS.get(_method(line))
    if kind is None:
        return []
    params = mapping(mapping(decoded(line)).get("params"))
    return _chunk(kind, params.get("delta"), params.get("itemId"))


class CodexProjector:
    """Translator of the frames of a turn in order. It emits text as it arrives."""

    def __init__(self) -> None:
        # Unfinished items whose text the deltas have already emitted.
        self._told: set[str] = set()

    def project(self, line: bytes) -> list[Update]:
        """Translate the next frame. Never raises."""
        if _method(line) in _DELTAS:
            updates = partial(line)
            self._told.update(update["messageId"] for update in updates if "messageId" in update)
            return updates
        updates = project(line)
        told = [update for update in updates if update["sessionUpdate"] in (_MESSAGE, _THOUGHT)]
        if not told or told[0].get("messageId") not in self._told:
            return updates
        # An item completes only once, so its entry can be dropped.
        self._told.discard(told[0]["messageId"])
        return [update for update in updates if update not in told]


class CodexTranscript:
    """Collector of the text in the frames of a turn, including deltas of an unfinished item.

    A turn can be long. At least the last `SAID_CHARACTERS_MAX` characters are kept.
    """

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._partial: list[str] = []
        self._item: Any = None
        self._length = 0

    def add(self, line: bytes) -> None:
        method = _method(line)
        if _DELTAS.get(method) == _MESSAGE:
            params = mapping(mapping(decoded(line)).get("params"))
            if params.get("itemId") != self._item:
                self._item, self._partial = params.get("itemId"), []
            self._partial.append(text(params.get("delta")) or "")
        elif method == "item/completed":
            for update in project(line):
                if update["sessionUpdate"] == _MESSAGE:
                    self._keep(update["content"]["text"])
                    self._partial = []

    def text(self) -> str | None:
        """Return the text, or None if there is no text."""
        return "".join((*self._whole, *self._partial)) or None

    def _keep(self, said: str) -> None:
        self._whole.append(said)
        self._length += len(said)
        while self._length - len(self._whole[0]) >= SAID_CHARACTERS_MAX:
            self._length -= len(self._whole.pop(0))


def _chunk(kind: str, said: Any, item: Any) -> list[Update]:
    if not isinstance(said, str) or not said:
        return []
    update: Update = {"sessionUpdate": kind, "content": {"type": "text", "text": said}}
    if isinstance(item, str):
        update["messageId"] = item
    return [update]


def _began(item: dict[str, Any]) -> list[Update]:
    call, kind = item.get("id"), _KINDS.get(text(item.get("type")) or "")
    if not isinstance(call, str) or kind is None:
        return []
    update: Update = {
        "sessionUpdate": "tool_call",
        "toolCallId": call,
        "title": _title(item)[:TITLE_CHARACTERS_MAX],
        "kind": "fetch"
        if kind == "search" and mapping(item.get("action")).get("type") == "openPage"
        else kind,
        "status": "in_progress",
        "rawInput": {name: item[name] for name in _GIVEN if item.get(name) is not None},
    }
    changes = _changes(item)
    return [update | {"content": changes} if changes else update]


def _title(item: dict[str, Any]) -> str:
    match item["type"]:
        case "fileChange":
            paths = [
                path
                for change in map(mapping, items(item.get("changes")))
                if (path := text(change.get("path")))
            ]
            return f"Edit {', '.join(paths)}" if paths else "Edit"
        case "mcpToolCall":
            return f"{text(item.get('server')) or 'mcp'}: {text(item.get('tool')) or ''}"
        case kind:
            names = ("command", "query", "path", "tool", "prompt")
            return next((said for name in names if (said := text(item.get(name)))), kind)


def _completed(item: dict[str, Any]) -> list[Update]:
    match item.get("type"):
        case "agentMessage" | "plan":
            return _chunk(_MESSAGE, item.get("text"), item.get("id"))
        case "reasoning":
            parts = (*items(item.get("summary")), *items(item.get("content")))
            return [update for part in parts for update in _chunk(_THOUGHT, part, item.get("id"))]
        case _:
            return _ended(item)


def _ended(item: dict[str, Any]) -> list[Update]:
    call = item.get("id")
    if not isinstance(call, str) or text(item.get("type")) not in _KINDS:
        return []
    # A declined call did not run and counts as failed. An item type without a status cannot fail.
    is_well = item.get("status") in (None, "completed") and item.get("success") is not False
    update: Update = {
        "sessionUpdate": "tool_call_update",
        "toolCallId": call,
        "status": "completed" if is_well else "failed",
    }
    content = _output(item)
    if content:
        update["content"] = content
    if isinstance(item.get("exitCode"), int):
        update["rawOutput"] = {"exitCode": item["exitCode"]}
    return [update]


def _output(item: dict[str, Any]) -> list[dict[str, Any]]:
    match item["type"]:
        case "commandExecution":
            return _texts(item.get("aggregatedOutput"))
        case "fileChange":
            return _changes(item)
        case "mcpToolCall":
            parts = map(mapping, items(mapping(item.get("result")).get("content")))
            shown = [
                {"type": "content", "content": part}
                for part in parts
                if part.get("type") in ("text", "image")
            ]
            return shown or _texts(mapping(item.get("error")).get("message"))
        case "dynamicToolCall":
            return [
                each
                for part in map(mapping, items(item.get("contentItems")))
                for each in _texts(part.get("text"))
            ]
        case _:
            return []


def _texts(said: Any) -> list[dict[str, Any]]:
    return (
        [{"type": "content", "content": {"type": "text", "text": said}}]
        if isinstance(said, str) and said
        else []
    )


def _changes(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the file changes of an item as ACP diffs."""
    if item.get("type") != "fileChange":
        return []
    shown: list[dict[str, Any]] = []
    for change in map(mapping, items(item.get("changes"))):
        path, diff = text(change.get("path")), text(change.get("diff"))
        if path is not None and diff is not None:
            kind = change.get("kind")
            old, new = _sides(diff, text(kind) or text(mapping(kind).get("type")) or "update")
            shown.append({"type": "diff", "path": path, "oldText": old, "newText": new})
    return shown


def _sides(diff: str, kind: str) -> tuple[str | None, str]:
    """Split a diff into old and new text. For an edited file, only the touched places appear."""
    if kind == "add":
        return None, diff
    if kind == "delete":
        return diff, ""
    lines = [
        line
        for line in diff.splitlines(keepends=True)
        if not line.startswith(("@@", "--- ", "+++ ", "\\"))
    ]
    old = "".join(line[1:] for line in lines if line[:1] != "+")
    new = "".join(line[1:] for line in lines if line[:1] != "-")
    return old, new


def _plan(params: dict[str, Any]) -> list[Update]:
    statuses = {"inProgress": "in_progress", "completed": "completed"}
    entries = [
        {
            "content": step["step"],
            "priority": "medium",
            "status": statuses.get(text(step.get("status")) or "", "pending"),
        }
        for step in map(mapping, items(params.get("plan")))
        if isinstance(step.get("step"), str)
    ]
    return [{"sessionUpdate": "plan", "entries": entries}]


def _usage(usage: dict[str, Any]) -> list[Update]:
    """Return the use of the context window by the last model call."""
    used, size = mapping(usage.get("last")).get("totalTokens"), usage.get("modelContextWindow")
    return [{"sessionUpdate": "usage_update", "used": count(used) or 0, "size": count(size) or 0}]
