"""Claude Code's frames as ACP session updates: the projection that readers see.

**Text is told once.** The agent says everything twice: in deltas, as the model speaks, and in an `assistant` frame when
a block is complete. What was answered from a cache, over a gateway that does not stream, by a subagent or by the agent
itself ("API Error: …") has no deltas. So there are two readings, each of which tells everything once:

- `project` knows one frame and nothing else, wherever it stands: text is told by the complete frame, never by deltas.
- `ClaudeProjector` is fed the frames of a turn from its beginning: text is told by the deltas, as it comes, and by the
  complete frame only where there were none.

`partial` is for who reads by `project` and shows a text as it grows: it tells what one delta says, and the complete
frame will say it again. It does not know the message's id, which only the first frame of the message has.

Updates have what ACP gives them (`sessionUpdate`, `toolCallId`, …). A message's chunks carry its `messageId`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from banksman.core.wire.partial_json import UNDECODABLE, decoded, mapping, mappings

Update = dict[str, Any]

# The kinds of ACP by the agent's tool names. Any other tool is "other".
_KINDS = {
    **dict.fromkeys(("Read", "NotebookRead", "LS"), "read"),
    **dict.fromkeys(("Edit", "MultiEdit", "Write", "NotebookEdit"), "edit"),
    **dict.fromkeys(("Glob", "Grep", "ToolSearch"), "search"),
    **dict.fromkeys(("Bash", "BashOutput", "KillShell"), "execute"),
    **dict.fromkeys(("WebFetch", "WebSearch"), "fetch"),
    **dict.fromkeys(("Task", "Agent"), "think"),
    "ExitPlanMode": "switch_mode",
}
# What a tool is about, by the name of its input that says so best.
_TITLES = ("description", "command", "file_path", "notebook_path", "pattern", "path", "url", "query", "prompt")
TITLE_CHARACTERS_MAX = 200
# What is kept of the text of a turn that ended without an answer: its end, for a person to read.
SAID_CHARACTERS_MAX = 1 << 20


def project(line: bytes) -> list[Update]:
    """A frame as session updates: none, one or several. Never raises."""
    if _is_delta(line):
        return []
    frame = mapping(decoded(line))
    match frame.get("type"):
        case "assistant":
            message = mapping(frame.get("message"))
            content = message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else mappings(content)
            message_id = message.get("id")
            return [update for block in blocks for update in _output(block, message_id)]
        case "user":
            blocks = mappings(mapping(frame.get("message")).get("content"))
            return [update for block in blocks for update in _tool_ended(block)]
        case "result":
            return _usage(frame)
        case _:
            return []


class _Typed(msgspec.Struct, gc=False):
    type: str = ""


_type_decoder = msgspec.json.Decoder(_Typed)


def _is_delta(line: bytes) -> bool:
    """Most frames of any turn are, and say nothing here: their type is all that is decoded of them."""
    try:
        return _type_decoder.decode(line).type == "stream_event"
    except UNDECODABLE:
        return False


def partial(line: bytes) -> list[Update]:
    """What one delta says of a text that is not complete. Never raises. A subagent's messages come whole."""
    if not _is_delta(line):
        return []
    frame = mapping(decoded(line))
    return [] if frame.get("parent_tool_use_id") is not None else _said(mapping(frame.get("event")), None)


def _said(event: dict[str, Any], message_id: Any) -> list[Update]:
    delta = mapping(event.get("delta"))
    match delta.get("type"):
        case "text_delta":
            return _chunk("agent_message_chunk", delta.get("text"), message_id)
        case "thinking_delta":
            return _chunk("agent_thought_chunk", delta.get("thinking"), message_id)
        case _:
            return []


class ClaudeProjector:
    """The updates of a turn as its frames come, from the first one on."""

    def __init__(self) -> None:
        # Of the message that is being said: its id, and the kinds of block that it has told in deltas.
        self._message: Any = None
        self._told: set[str] = set()

    def project(self, line: bytes) -> list[Update]:
        """Never raises."""
        frame = mapping(decoded(line))
        # A subagent's messages come whole, between the deltas of the one that called it.
        is_main = frame.get("parent_tool_use_id") is None
        if frame.get("type") == "stream_event":
            return self._streamed(mapping(frame.get("event"))) if is_main else []
        updates = project(line)
        if frame.get("type") != "assistant" or not is_main or mapping(frame.get("message")).get("id") != self._message:
            return updates
        return [update for update in updates if update["sessionUpdate"] not in self._told]

    def _streamed(self, event: dict[str, Any]) -> list[Update]:
        if event.get("type") == "message_start":
            self._message = mapping(event.get("message")).get("id")
            self._told = set()
        updates = _said(event, self._message)
        self._told.update(update["sessionUpdate"] for update in updates)
        return updates


class ClaudeTranscript:
    """The text in the frames of a turn, with the deltas of a block that was never completed, as they are added.

    A turn can be long: of its text the end is kept, of at least `SAID_CHARACTERS_MAX`.
    """

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._partial: list[str] = []
        self._length = 0

    def add(self, line: bytes) -> None:
        # Nearly every frame of a turn that is worth this call is a delta, and most frames of any turn are not text.
        frame = mapping(decoded(line))
        if frame.get("parent_tool_use_id") is not None:
            return
        match frame.get("type"):
            case "stream_event":
                event = mapping(frame.get("event"))
                if event.get("type") == "content_block_start":
                    self._partial = []
                delta = mapping(event.get("delta"))
                text = delta.get("text")
                if delta.get("type") == "text_delta" and isinstance(text, str):
                    self._partial.append(text)
            case "assistant":
                for update in project(line):
                    if update["sessionUpdate"] == "agent_message_chunk":
                        self._keep(update["content"]["text"])
                self._partial = []
            case _:
                pass

    def text(self) -> str | None:
        """None: there is none."""
        return "".join((*self._whole, *self._partial)) or None

    def _keep(self, text: str) -> None:
        self._whole.append(text)
        self._length += len(text)
        while self._length - len(self._whole[0]) >= SAID_CHARACTERS_MAX:
            self._length -= len(self._whole.pop(0))


def _output(block: dict[str, Any], message_id: Any) -> list[Update]:
    match block.get("type"):
        case "text":
            return _chunk("agent_message_chunk", block.get("text"), message_id)
        case "thinking":
            return _chunk("agent_thought_chunk", block.get("thinking"), message_id)
        case "tool_use" | "server_tool_use" | "mcp_tool_use":
            return _tool_began(block)
        case _:
            return []


def _chunk(kind: str, text: Any, message_id: Any) -> list[Update]:
    # Thinking comes without its text when the model keeps it to itself.
    if not isinstance(text, str) or not text:
        return []
    update: Update = {"sessionUpdate": kind, "content": {"type": "text", "text": text}}
    if isinstance(message_id, str):
        update["messageId"] = message_id
    return [update]


def _tool_began(block: dict[str, Any]) -> list[Update]:
    call, name = block.get("id"), block.get("name")
    if not isinstance(call, str) or not isinstance(name, str):
        return []
    given = mapping(block.get("input"))
    began: Update = {
        "sessionUpdate": "tool_call",
        "toolCallId": call,
        "title": _title(name, given),
        "kind": _KINDS.get(name, "other"),
        "status": "in_progress",
        "rawInput": given,
    }
    # The plan is shown beside the call and not instead of it: the call's end will come, and must have a beginning.
    return [began, *_plan(given)] if name == "TodoWrite" else [began]


def _title(name: str, given: dict[str, Any]) -> str:
    about = next((given[key] for key in _TITLES if isinstance(given.get(key), str) and given[key]), None)
    return name if about is None else f"{name}: {about}"[:TITLE_CHARACTERS_MAX]


def _plan(given: dict[str, Any]) -> list[Update]:
    entries = [
        {
            "content": todo["content"],
            "priority": "medium",
            "status": todo["status"] if todo.get("status") in ("in_progress", "completed") else "pending",
        }
        for todo in mappings(given.get("todos"))
        if isinstance(todo.get("content"), str)
    ]
    return [{"sessionUpdate": "plan", "entries": entries}]


def _tool_ended(block: dict[str, Any]) -> list[Update]:
    call = block.get("tool_use_id")
    if block.get("type") != "tool_result" or not isinstance(call, str):
        return []
    update: Update = {
        "sessionUpdate": "tool_call_update",
        "toolCallId": call,
        "status": "failed" if block.get("is_error") is True else "completed",
    }
    output = block.get("content")
    parts = [{"type": "text", "text": output}] if isinstance(output, str) else mappings(output)
    content = [{"type": "content", "content": shown} for part in parts if (shown := _shown(part)) is not None]
    if content:
        update["content"] = content
    return [update]


def _shown(part: dict[str, Any]) -> dict[str, Any] | None:
    """A part of a tool's output as an ACP content block; None: of a kind that ACP lacks."""
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return {"type": "text", "text": text}
    source = mapping(part.get("source"))
    data, media_type = source.get("data"), source.get("media_type")
    if part.get("type") == "image" and isinstance(data, str) and isinstance(media_type, str):
        return {"type": "image", "data": data, "mimeType": media_type}
    return None


def _usage(frame: dict[str, Any]) -> list[Update]:
    """What the turn used of the model's window, and what the conversation has cost since the process began."""
    usage = mapping(frame.get("usage"))
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    windows = [_count(mapping(model).get("contextWindow")) for model in mapping(frame.get("modelUsage")).values()]
    update: Update = {
        "sessionUpdate": "usage_update",
        "used": sum(_count(usage.get(name)) for name in names),
        "size": max(windows, default=0),
    }
    cost = frame.get("total_cost_usd")
    if isinstance(cost, int | float) and not isinstance(cost, bool):
        update["cost"] = {"amount": cost, "currency": "USD"}
    return [update]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
