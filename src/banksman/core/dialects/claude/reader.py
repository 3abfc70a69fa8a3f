"""What Claude Code says, and what it means to a turn: its stream-json, one JSON object a line, as 2.1 speaks it.

**What opens and ends a turn.** A prompt carries a uuid of ours. The agent then reports on that uuid
(`command_lifecycle`: queued, started, completed or cancelled), names it in the `system/init` that opens each turn, and
in the `result` that is its boundary. Prompts that wait are merged: one init and one result then name several. An init
or a result that names none of ours is a turn of the agent's own. Only from the init on does it take an interrupt;
before, it acknowledges one and goes on. The acknowledgement comes first, the aborted result after it.

**What is an error.** A result says so twice, in `is_error` and in `subtype`, and the two disagree: a failed model call
is "success" with `is_error`. Either is believed.

**Order.** The names of an object come in no fixed order: a result has its `type` near its end. Only the frames that
come by the thousand are known by their first bytes, and only where those say it all.

**What cannot be decoded** is noise, unless it is an object for all that: then its members are read one by one (see
core/wire/partial_json.py), because a boundary that is not understood is a turn that does not end.

**Cost** per bare token frame: a comparison of its first bytes. Any other frame: one decode of the members below, in
which everything else is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from banksman.core.dialects.claude import writer
from banksman.core.dialects.meaning import (
    Meaning,
    Noise,
    PromptSettled,
    PromptTaken,
    Replied,
    Requested,
    RequestPurpose,
    RequestWithdrawn,
    TasksChanged,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
)
from banksman.core.wire.framing import HEAD_BYTES
from banksman.core.wire.partial_json import UNDECODABLE, Members, items, mapping, mappings, mended, split, text, texts

# Beyond this an undecodable line is judged by its head: reading members costs a step of Python a token.
SALVAGE_BYTES_MAX = 1 << 20

CONVERSATION_CHARACTERS_MAX = 256

# Frames that are the turn's work. Whatever else stands in them, these first bytes settle it: a writer of JSON does not
# name a member twice. A few say more, and have a word in them that cannot stand in a text: its quotes would be escaped.
_DELTA = b'{"type":"stream_event",'
# Of these most are a piece of text, which the first bytes tell too: a search through each of them would cost more than
# all the rest of this.
_TEXT_DELTAS = tuple(
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta",' % index
    for index in range(4)
)
_THINKING = b'"thinking_delta"'
_SPOKEN = b'{"type":"assistant",'
_TOOL_USE = b'"tool_use"'
_HEARD = b'{"type":"user",'
_TOOL_RESULT = b'"tool_result"'

# The conversation is being rewritten into a shorter one. It is silent meanwhile, for minutes: as if a tool ran.
_COMPACTION = "compaction"
# How a model says that a conversation is too long for it. The agent has tried to make it shorter by then.
_OVERFLOW = "prompt is too long"

# System frames by which the agent shows that it gets on. Not among them: `api_retry` (it waits), `status` (a request
# goes out, and nothing has come of it), `thinking_tokens` (see `Thought`), `session_state_changed` (a state, no step).
_PROGRESS = frozenset(
    (
        *("permission_denied", "hook_started", "hook_progress", "hook_response"),
        *("task_started", "task_progress", "task_updated", "task_notification", "local_command_output"),
    )
)

_NOISE = Noise()
_THOUGHT = Thought()


class _ClaudeFrame(msgspec.Struct, gc=False):
    """The members that mean something to a turn. Only the type is checked: a bad value costs itself, not the frame."""

    type: str = ""
    subtype: Any = None
    session_id: Any = None
    origin: Any = None
    # assistant, user; stream_event
    message: Any = None
    event: Any = None
    user_message_uuids: Any = None
    user_message_uuid: Any = None
    # system
    status: Any = None
    compact_result: Any = None
    tasks: Any = None
    # command_lifecycle
    command_uuid: Any = None
    state: Any = None
    # control_request, control_response, control_cancel_request
    request_id: Any = None
    request: Any = None
    response: Any = None
    # result
    is_error: Any = None
    terminal_reason: Any = None
    api_error_status: Any = None
    result: Any = None
    structured_output: Any = None
    errors: Any = None
    stop_reason: Any = None
    usage: Any = None
    total_cost_usd: Any = None
    model_usage_since_last_result: Any = None


_decode = msgspec.json.Decoder(_ClaudeFrame).decode


def read(line: bytes) -> Meaning | None:
    """What a line means; None: it belongs to the turn and says nothing about it. Never raises."""
    if line.startswith(_TEXT_DELTAS):
        return None
    if line.startswith(_DELTA):
        return _THOUGHT if _THINKING in line else None
    if (line.startswith(_SPOKEN) and _TOOL_USE not in line) or (line.startswith(_HEARD) and _TOOL_RESULT not in line):
        return None
    try:
        frame = _decode(line)
    except UNDECODABLE:
        return _salvaged(line)
    meaning_of = _MEANINGS.get(frame.type)
    return _NOISE if meaning_of is None else meaning_of(frame)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """What a line that was too long to keep means, by its head alone. One that may be the boundary is taken for it.
    Never raises."""
    members = split(head)
    if not members.is_object:
        return _NOISE
    kind = members.get("type")
    if not isinstance(kind, str):
        if "type" in members.found or members.is_whole:
            return _NOISE
        # Its type is yet to come, as with every result.
        kind = "result"
    if kind == "result":
        frame = _picked(members, kind)
        return TurnOver(
            refs=_refs(frame),
            origin=_origin(frame),
            conversation=_conversation(frame),
            is_error=True,
            is_aborted=_is_aborted(frame),
            error="frame_too_large",
            stop_reason=text(frame.stop_reason),
            usage=mapping(frame.usage) or None,
            spent=_number(frame.total_cost_usd),
        )
    meaning_of = _MEANINGS.get(kind)
    if meaning_of is None:
        return _NOISE
    frame = _picked(members, kind)
    # Of a question as large as this one the answer is "no", but it must have one: the agent waits.
    if frame.request is None:
        inner = members.within("request")
        frame.request = {"subtype": inner.get("subtype")}
        if inner.get("callback_id") == writer.RULES_HOOK:
            # An error would be a hook that failed, and the agent might go on. Its name says what the rules say.
            given = {"tool_name": inner.within("input").get("tool_name")}
            frame.request |= {"callback_id": writer.RULES_HOOK, "input": given}
    if frame.response is None:
        inner = members.within("response")
        frame.response = {name: inner.get(name) for name in ("subtype", "request_id", "error")}
    return meaning_of(frame)


def _salvaged(line: bytes) -> Meaning | None:
    """The meaning of a line that was not decoded: not JSON at all, most likely."""
    better = mended(line)
    if better is not None:
        line = better
    try:
        frame = _decode(line)
    except (msgspec.ValidationError, RecursionError):
        # JSON so far as it was read, but no object, or too deep, or with a number that is none.
        if len(line) > SALVAGE_BYTES_MAX:
            return read_head(line[:HEAD_BYTES])
        members = split(line)
        kind = members.get("type")
        if not members.is_whole or not isinstance(kind, str):
            return _NOISE
        frame = _picked(members, kind)
    except UNDECODABLE:
        return _NOISE
    meaning_of = _MEANINGS.get(frame.type)
    return _NOISE if meaning_of is None else meaning_of(frame)


def _picked(members: Members, kind: str) -> _ClaudeFrame:
    rest = {name: members.get(name) for name in _ClaudeFrame.__struct_fields__ if name != "type"}
    return _ClaudeFrame(type=kind, **rest)


def _delta(frame: _ClaudeFrame) -> Meaning | None:
    delta = mapping(mapping(frame.event).get("delta")) or {}
    return _THOUGHT if delta.get("type") == "thinking_delta" else None


def _output(frame: _ClaudeFrame) -> Meaning | None:
    calls = tuple(call for block in _blocks(frame, "tool_use") if (call := text(block.get("id"))) is not None)
    return ToolBegan(calls) if calls else None


def _heard(frame: _ClaudeFrame) -> Meaning | None:
    blocks = _blocks(frame, "tool_result")
    calls = tuple(call for block in blocks if (call := text(block.get("tool_use_id"))) is not None)
    return ToolEnded(calls) if calls else None


def _blocks(frame: _ClaudeFrame, kind: str) -> list[dict[str, Any]]:
    content = mapping(frame.message).get("content")
    return [block for block in mappings(content) if block.get("type") == kind]


def _system(frame: _ClaudeFrame) -> Meaning | None:
    if frame.subtype == "init":
        return TurnOpened(
            refs=_refs(frame), origin=_origin(frame), conversation=_conversation(frame), can_interrupt=True
        )
    match frame.subtype:
        case "thinking_tokens":
            return _THOUGHT
        case "background_tasks_changed":
            names = (text(mapping(task).get("task_id")) for task in items(frame.tasks))
            return TasksChanged(tuple(name for name in names if name is not None))
        case "status" if frame.status == "compacting":
            return ToolBegan((_COMPACTION,))
        case "compact_boundary":
            return ToolEnded((_COMPACTION,))
        case "status" if frame.compact_result is not None:
            return ToolEnded((_COMPACTION,))  # Also of one that failed, which has no boundary.
        case str(subtype) if subtype in _PROGRESS:
            return None
        case _:
            return _NOISE


def _lifecycle(frame: _ClaudeFrame) -> Meaning | None:
    ref = frame.command_uuid
    if not isinstance(ref, str):
        return _NOISE
    match frame.state:
        case "queued":
            return PromptTaken(ref)
        case "started":
            return TurnOpened(refs=(ref,))
        case "completed" | "cancelled":
            return PromptSettled(ref, is_cancelled=frame.state == "cancelled")
        case _:
            return None


def _result(frame: _ClaudeFrame) -> Meaning | None:
    subtype = text(frame.subtype) or ""
    is_error = frame.is_error is True or subtype.startswith("error")
    error = _error(frame) if is_error else None
    return TurnOver(
        refs=_refs(frame),
        origin=_origin(frame),
        conversation=_conversation(frame),
        is_error=is_error,
        is_aborted=_is_aborted(frame),
        is_overflow=error is not None and (frame.terminal_reason == "prompt_too_long" or _OVERFLOW in error.lower()),
        # An interrupted turn's result may have none.
        text=text(frame.result),
        structured=frame.structured_output,
        error=error,
        stop_reason=text(frame.stop_reason),
        usage=mapping(frame.usage) or None,
        spent=_number(frame.total_cost_usd),
        cost=_cost(frame),
    )


def _cost(frame: _ClaudeFrame) -> float | None:
    """Of this turn alone, where it says so: the total goes on through a resume, and back after a kill."""
    models = frame.model_usage_since_last_result
    costs = [_number(mapping(model).get("costUSD")) for model in mapping(models).values()]
    if not isinstance(models, dict) or None in costs:
        return None
    return sum((cost for cost in costs if cost is not None), 0.0)


def _error(frame: _ClaudeFrame) -> str:
    """The text that says most: what it told the user, else its list of errors, else its words for the kind of end."""
    said = text(frame.result) or "\n".join(texts(frame.errors))
    if said:
        return said
    words = (frame.subtype, frame.terminal_reason, frame.api_error_status)
    return " ".join(str(word) for word in words if isinstance(word, str | int) and word != "success") or "error"


def _control_reply(frame: _ClaudeFrame) -> Meaning | None:
    response = mapping(frame.response)
    request = response.get("request_id")
    if not isinstance(request, str):
        return _NOISE
    if response.get("subtype") != "success":
        return Replied(request, error=text(response.get("error")) or "the agent gave no reason")
    receipt = mapping(response.get("response"))
    return Replied(request, still_queued=texts(receipt.get("still_queued")))


def _control_asked(frame: _ClaudeFrame) -> Meaning | None:
    request = frame.request_id
    # Only what has a name can be answered.
    if not isinstance(request, str):
        return _NOISE
    asked = mapping(frame.request)
    subtype = text(asked.get("subtype")) or ""
    given = mapping(asked.get("input"))
    match subtype:
        case "can_use_tool" if isinstance(asked.get("tool_name"), str):
            details = {name: value for name, value in asked.items() if name not in ("subtype", "tool_name", "input")}
            return Requested(request, RequestPurpose.PERMISSION, subtype, asked["tool_name"], given, details)
        case "hook_callback" if asked.get("callback_id") == writer.RULES_HOOK:
            tool = text(given.get("tool_name")) or ""
            return Requested(request, RequestPurpose.RULING, subtype, tool, mapping(given.get("tool_input")))
        case "hook_callback" if isinstance(asked.get("callback_id"), str):
            return Requested(request, RequestPurpose.HOOK, subtype, asked["callback_id"], given)
        case "mcp_message" if isinstance(asked.get("server_name"), str):
            message = mapping(asked.get("message"))
            return Requested(request, RequestPurpose.TOOL, subtype, asked["server_name"], message)
        case "elicitation":
            details = {name: value for name, value in asked.items() if name != "subtype"}
            server = text(asked.get("mcp_server_name")) or ""
            return Requested(request, RequestPurpose.ELICITATION, subtype, server, {}, details)
        case _:
            return Requested(request, RequestPurpose.UNKNOWN, subtype)


def _control_withdrawn(frame: _ClaudeFrame) -> Meaning | None:
    return RequestWithdrawn(frame.request_id) if isinstance(frame.request_id, str) else _NOISE


_MEANINGS: dict[str, Callable[[_ClaudeFrame], Meaning | None]] = {
    "assistant": _output,
    "user": _heard,
    "stream_event": _delta,
    "system": _system,
    "command_lifecycle": _lifecycle,
    "result": _result,
    "control_response": _control_reply,
    "control_request": _control_asked,
    "control_cancel_request": _control_withdrawn,
}


def _refs(frame: _ClaudeFrame) -> tuple[str, ...]:
    """The prompts it names. The single name is the last of several, and what older versions have."""
    return texts(frame.user_message_uuids) or texts([frame.user_message_uuid])


def _origin(frame: _ClaudeFrame) -> str | None:
    kind = mapping(frame.origin).get("kind")
    return kind if isinstance(kind, str) and kind != "human" else None


def _is_aborted(frame: _ClaudeFrame) -> bool:
    return (text(frame.terminal_reason) or "").startswith("aborted")


def _conversation(frame: _ClaudeFrame) -> str | None:
    """Its name for the conversation, if it can be one: it becomes a word of a command line."""
    name = text(frame.session_id)
    return name if name and len(name) <= CONVERSATION_CHARACTERS_MAX and name.isprintable() else None


def _number(value: Any) -> float | None:
    # An int of JSON may be larger than any float.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None
