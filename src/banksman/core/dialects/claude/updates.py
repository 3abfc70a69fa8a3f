"""Claude Code frames as ACP session updates for readers, and the text of a turn.

`project` and `partial` translate one frame. `ClaudeProjector` translates the frames of a turn in
order. `ClaudeTranscript` collects the text of a turn, including an unfinished message.

**Each text appears once.** The agent sends everything twice: in deltas while the model writes, and
in an `assistant` frame when a block is complete. Some answers have no deltas: from a cache, over a
gateway without streaming, of a subagent, or written by the agent program ("API Error: …"). Two
projections exist, and each emits everything once:

- `project` sees one frame without context. It emits text from the complete frame, never from
  deltas.
- `ClaudeProjector` gets the frames of a turn from its beginning. It emits text from the deltas as
  they arrive, and from the complete frame only if there were no deltas.

`partial` serves a reader of `project` that shows a text while it grows. It emits one delta, and the
complete frame repeats the text. It does not know the message's id, which only the first frame of
the message has.

Updates have the members that ACP defines (`sessionUpdate`, `toolCallId`, …). The chunks of a
message carry its `messageId`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from banksman.core.wire.partial_json import UNDECODABLE, count, decoded, mapping, mappings, number

Update = dict[str, Any]

# ACP tool kinds by the agent's tool names. Any other tool is "other".
_KINDS = {
    **dict.fromkeys(("Read", "NotebookRead", "LS"), "read"),
    **dict.fromkeys(("Edit", "MultiEdit", "Write", "NotebookEdit"), "edit"),
    **dict.fromkeys(("Glob", "Grep", "ToolSearch"), "search"),
    **dict.fromkeys(("Bash", "BashOutput", "KillShell"), "execute"),
    **dict.fromkeys(("WebFetch", "WebSearch"), "fetch"),
    **dict.fromkeys(("Task", "Agent"), "think"),
    "ExitPlanMode": "switch_mode",
}
# Input members that describe a tool call, the best first.
_TITLES = (
    "description",
    "command",
    "file_path",
    "notebook_path",
    "pattern",
    "path",
    "url",
    "query",
    "prompt",
)
TITLE_CHARACTERS_MAX = 200
# Maximum characters kept of a turn that ended without an answer. The end is kept, for a person to
# read.
SAID_CHARACTERS_MAX = 1 << 20


def project(line: bytes) -> list[Update]:
    """Translate a frame to session updates: none, one or several. Never raises."""
    if line.startswith(_SPOKEN):
        try:
            said = _spoken_decoder.decode(line).message
        except UNDECODABLE:
            pass  # Another kind of block, several blocks, or text that must be repaired.
        else:
            return _chunk("agent_message_chunk", said.content[0].text, said.id)
    elif _is_delta(line):
        return []
    frame = mapping(decoded(line))
    match frame.get("type"):
        case "assistant":
            message = mapping(frame.get("message"))
            content = message.get("content")
            blocks = (
                [{"type": "text", "text": content}]
                if isinstance(content, str)
                else mappings(content)
            )
            message_id = message.get("id")
            return [update for block in blocks for update in _output(block, message_id)]
        case "user":
            blocks = mappings(mapping(frame.get("message")).get("content"))
            return [update for block in blocks for update in _tool_ended(block)]
        case "result":
            return _usage(frame)
        case _:
            return []


_TYPE = b'{"type":"'
_DELTA = b'{"type":"stream_event"'
# The frames with output of the model.
_OUTPUT = (b'{"type":"assistant"', _DELTA)


class _Typed(msgspec.Struct, gc=False):
    type: str = ""


_type_decoder = msgspec.json.Decoder(_Typed)


# A message of one text, which is what nearly every `assistant` frame is. To decode it with its type
# takes a third of the time.
_SPOKEN = b'{"type":"assistant"'


class _Text(msgspec.Struct, gc=False):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, gc=False):
    content: tuple[_Text]
    id: str | None = None


class _SpokenFrame(msgspec.Struct, gc=False):
    type: Literal["assistant"]
    message: _Message


_spoken_decoder = msgspec.json.Decoder(_SpokenFrame)


def _is_delta(line: bytes) -> bool:
    """Return whether a frame is a delta, by decoding only its type.

    Most frames of any turn are deltas, and `project` ignores them. The agent writes the type first.
    A frame that begins with another type is decoded by the caller anyway.
    """
    if line.startswith(_TYPE) and not line.startswith(_DELTA):
        return False
    try:
        return _type_decoder.decode(line).type == "stream_event"
    except UNDECODABLE:
        return False


def may_show_output(line: bytes) -> bool:
    """Return False if a frame begins with a type that has no text, thinking or tool call."""
    return not line.startswith(_TYPE) or line.startswith(_OUTPUT)


def partial(line: bytes) -> list[Update]:
    """Translate one delta of an unfinished text. Never raises.

    The messages of a subagent arrive complete, so its frames give nothing here.
    """
    if not _is_delta(line):
        return []
    frame = mapping(decoded(line))
    return (
        []
        if frame.get("parent_tool_use_id") is not None
        else _said(mapping(frame.get("event")), None)
    )


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
    """Translator of the frames of a turn in order. It emits text as it arrives."""

    def __init__(self) -> None:
        # The message in progress: its id, and the kinds of block that its deltas have emitted.
        self._message: Any = None
        self._told: set[str] = set()

    def project(self, line: bytes) -> list[Update]:
        """Translate the next frame. Never raises."""
        frame = mapping(decoded(line))
        # Messages of a subagent arrive complete, between the deltas of the agent that called it.
        is_main = frame.get("parent_tool_use_id") is None
        if frame.get("type") == "stream_event":
            return self._streamed(mapping(frame.get("event"))) if is_main else []
        updates = project(line)
        if (
            frame.get("type") != "assistant"
            or not is_main
            or mapping(frame.get("message")).get("id") != self._message
        ):
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
    """Collector of the text in the frames of a turn, including deltas of an unfinished block.

    A turn can be long. At least the last `SAID_CHARACTERS_MAX` characters are kept.
    """

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._partial: list[str] = []
        self._length = 0

    def add(self, line: bytes) -> None:
        # No shortcut by type: nearly every frame of a turn that needs this call is a delta, and has
        # to be decoded.
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
        """Return the text, or None if there is no text."""
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
    # A thinking block has no text when the model withholds it.
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
    # The plan is emitted in addition to the call, not instead of it: the end of the call follows
    # and needs a beginning.
    return [began, *_plan(given)] if name == "TodoWrite" else [began]


def _title(name: str, given: dict[str, Any]) -> str:
    about = next(
        (given[key] for key in _TITLES if isinstance(given.get(key), str) and given[key]), None
    )
    return name if about is None else f"{name}: {about}"[:TITLE_CHARACTERS_MAX]


def _plan(given: dict[str, Any]) -> list[Update]:
    entries = [
        {
            "content": todo["content"],
            "priority": "medium",
            "status": todo["status"]
            if todo.get("status") in ("in_progress", "completed")
            else "pending",
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
    content = [
        {"type": "content", "content": shown}
        for part in parts
        if (shown := _shown(part)) is not None
    ]
    if content:
        update["content"] = content
    return [update]


def _shown(part: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a part of a tool's output to an ACP content block; None if ACP has no such kind."""
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return {"type": "text", "text": text}
    source = mapping(part.get("source"))
    data, media_type = source.get("data"), source.get("media_type")
    if part.get("type") == "image" and isinstance(data, str) and isinstance(media_type, str):
        return {"type": "image", "data": data, "mimeType": media_type}
    return None


def _usage(frame: dict[str, Any]) -> list[Update]:
    """Return the use of the context window by the turn, and the cost since the process started."""
    usage = mapping(frame.get("usage"))
    names = (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    )
    windows = [
        count(mapping(model).get("contextWindow")) or 0
        for model in mapping(frame.get("modelUsage")).values()
    ]
    update: Update = {
        "sessionUpdate": "usage_update",
        "used": sum(count(usage.get(name)) or 0 for name in names),
        "size": max(windows, default=0),
    }
    cost = frame.get("total_cost_usd")
    if number(cost) is not None:
        update["cost"] = {"amount": cost, "currency": "USD"}
    return [update]
