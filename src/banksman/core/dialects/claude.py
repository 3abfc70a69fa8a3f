"""Claude Code's stream-json: one JSON object a line in both directions, as 2.1 speaks it.

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
members.py), because a boundary that is not understood is a turn that does not end.

**Cost** per bare token frame: a comparison of its first bytes. Any other frame: one decode of the members below, in
which everything else is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from banksman.core.dialects import claude_updates
from banksman.core.dialects.dialect import Prompt
from banksman.core.dialects.members import UNDECODABLE, Members, mended, split
from banksman.core.framing import HEAD_BYTES
from banksman.core.meaning import (
    Meaning,
    Noise,
    PromptSettled,
    PromptTaken,
    Replied,
    Requested,
    RequestWithdrawn,
    TurnOpened,
    TurnOver,
)
from banksman.errors import UsageError

# Beyond this an undecodable line is judged by its head: reading members costs a step of Python a token.
SALVAGE_BYTES_MAX = 1 << 20

# Frames that are the turn's work and nothing else. Whatever else stands in them, these first bytes settle it: a writer
# of JSON does not name a member twice.
_BARE = (b'{"type":"stream_event",', b'{"type":"assistant",', b'{"type":"user",')

# System frames by which the agent shows that it gets on. Not among them: `api_retry` (it waits), `status` (a request
# goes out, and nothing has come of it), `session_state_changed` and `background_tasks_changed` (a state, not a step).
_PROGRESS = frozenset(
    (
        *("thinking_tokens", "permission_denied", "compact_boundary", "hook_started", "hook_progress", "hook_response"),
        *("task_started", "task_progress", "task_updated", "task_notification", "local_command_output"),
    )
)

_NOISE = Noise()


class _Frame(msgspec.Struct, gc=False):
    """The members that mean something to a turn. Only the type is checked: a bad value costs itself, not the frame."""

    type: str = ""
    subtype: Any = None
    session_id: Any = None
    origin: Any = None
    user_message_uuids: Any = None
    user_message_uuid: Any = None
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
    errors: Any = None
    stop_reason: Any = None
    usage: Any = None
    total_cost_usd: Any = None


_decode = msgspec.json.Decoder(_Frame).decode


class Claude:
    """The dialect. It has no state: one instance, `CLAUDE`, serves every session."""

    __slots__ = ()

    name: str = "claude"
    acknowledges_interrupts: bool = True
    can_steer: bool = True

    def __repr__(self) -> str:
        return "<Claude dialect>"

    def read(self, line: bytes) -> Meaning | None:
        """What a line means; None: it belongs to the turn and says nothing about it. Never raises."""
        if line.startswith(_BARE):
            return None
        try:
            frame = _decode(line)
        except UNDECODABLE:
            return _salvaged(line)
        meaning_of = _MEANINGS.get(frame.type)
        return _NOISE if meaning_of is None else meaning_of(frame)

    def read_head(self, head: bytes) -> Meaning | None:
        """What a line that was too long to keep means. One that may be the boundary is taken for it. Never raises."""
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
                conversation=_text(frame.session_id),
                is_error=True,
                is_aborted=_is_aborted(frame),
                error="frame_too_large",
                stop_reason=_text(frame.stop_reason),
                usage=_mapping(frame.usage),
                cost=_number(frame.total_cost_usd),
            )
        meaning_of = _MEANINGS.get(kind)
        if meaning_of is None:
            return _NOISE
        frame = _picked(members, kind)
        # Of a question as large as this one the answer is "no", but it must have one: the agent waits.
        if frame.request is None:
            frame.request = {"subtype": members.within("request").get("subtype")}
        if frame.response is None:
            inner = members.within("response")
            frame.response = {name: inner.get(name) for name in ("subtype", "request_id", "error")}
        return meaning_of(frame)

    def handshake(self, request: str) -> bytes:
        """Its answer means that the process is ready. No hooks: those are the agent's own files' business."""
        return _control_request(request, {"subtype": "initialize", "hooks": None})

    def prompt(self, ref: str, prompt: Prompt) -> bytes:
        """`ref` must be a uuid: the agent reports on no other."""
        content = _content(prompt)
        return _line(
            {
                "type": "user",
                "message": {"role": "user", "content": content},
                "parent_tool_use_id": None,
                # The process knows its conversation; this name only fills the place.
                "session_id": "default",
                "uuid": ref,
            }
        )

    def interrupt(self, request: str) -> bytes:
        return _control_request(request, {"subtype": "interrupt"})

    def answer(self, request: str, decision: Mapping[str, Any]) -> bytes:
        """A decision in the agent's words: `behavior` "allow" with `updatedInput`, or "deny" with a `message`."""
        response = {"subtype": "success", "request_id": request, "response": dict(decision)}
        return _line({"type": "control_response", "response": response})

    def refuse(self, request: str, error: str) -> bytes:
        response = {"subtype": "error", "request_id": request, "error": error}
        return _line({"type": "control_response", "response": response})

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates; the rules are in claude_updates.py. Never raises."""
        return claude_updates.project(line)

    def transcript(self) -> claude_updates.Transcript:
        """What the agent says in the frames of a turn, the unfinished sentence included."""
        return claude_updates.Transcript()

    def has_forgotten(self, stderr: str) -> bool:
        """Whether a process that was to resume a conversation ended because there is none of that name."""
        return "No conversation found" in stderr

    def argv(
        self,
        command: Sequence[str],
        *,
        resume: str | None = None,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        args: Sequence[str] = (),
    ) -> list[str]:
        """The command with what the dialect needs and what was wished for, then `args`.

        A value is always part of its flag's word, so that one that begins with a dash cannot become a flag.
        `--include-partial-messages`: without it a long answer is a long silence, no different from a hang, and a
        process that is killed leaves nothing of what it was saying.
        """
        wishes = {
            "resume": resume,
            "model": model,
            "permission-mode": permission_mode,
            "append-system-prompt": system_prompt,
        }
        return [
            *command,
            *("--print", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
            *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
            *(_flag(name, value) for name, value in wishes.items() if value is not None),
            *args,
        ]


CLAUDE = Claude()


# -- frames in -------------------------------------------------------------------------------------------------------
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
            return CLAUDE.read_head(line[:HEAD_BYTES])
        members = split(line)
        kind = members.get("type")
        if not members.is_whole or not isinstance(kind, str):
            return _NOISE
        frame = _picked(members, kind)
    except UNDECODABLE:
        return _NOISE
    meaning_of = _MEANINGS.get(frame.type)
    return _NOISE if meaning_of is None else meaning_of(frame)


def _picked(members: Members, kind: str) -> _Frame:
    rest = {name: members.get(name) for name in _Frame.__struct_fields__ if name != "type"}
    return _Frame(type=kind, **rest)


def _progress(_: _Frame) -> None:
    return None


def _system(frame: _Frame) -> Meaning | None:
    if frame.subtype == "init":
        return TurnOpened(
            refs=_refs(frame), origin=_origin(frame), conversation=_text(frame.session_id), can_interrupt=True
        )
    # A frozenset cannot be asked for a list.
    return None if isinstance(frame.subtype, str) and frame.subtype in _PROGRESS else _NOISE


def _lifecycle(frame: _Frame) -> Meaning | None:
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


def _result(frame: _Frame) -> Meaning | None:
    subtype = _text(frame.subtype) or ""
    is_error = frame.is_error is True or subtype.startswith("error")
    return TurnOver(
        refs=_refs(frame),
        origin=_origin(frame),
        conversation=_text(frame.session_id),
        is_error=is_error,
        is_aborted=_is_aborted(frame),
        # An interrupted turn's result may have none.
        text=_text(frame.result),
        error=_error(frame) if is_error else None,
        stop_reason=_text(frame.stop_reason),
        usage=_mapping(frame.usage),
        cost=_number(frame.total_cost_usd),
    )


def _error(frame: _Frame) -> str:
    """The text that says most: what it told the user, else its list of errors, else its words for the kind of end."""
    said = _text(frame.result) or "\n".join(_texts(frame.errors))
    if said:
        return said
    words = (frame.subtype, frame.terminal_reason, frame.api_error_status)
    return " ".join(str(word) for word in words if isinstance(word, str | int) and word != "success") or "error"


def _control_reply(frame: _Frame) -> Meaning | None:
    response = _mapping(frame.response) or {}
    request = response.get("request_id")
    if not isinstance(request, str):
        return _NOISE
    if response.get("subtype") != "success":
        return Replied(request, error=_text(response.get("error")) or "the agent gave no reason")
    receipt = _mapping(response.get("response")) or {}
    return Replied(request, still_queued=_texts(receipt.get("still_queued")))


def _control_asked(frame: _Frame) -> Meaning | None:
    request = frame.request_id
    # Only what has a name can be answered.
    if not isinstance(request, str):
        return _NOISE
    question = _mapping(frame.request) or {}
    subtype = _text(question.get("subtype")) or ""
    if subtype != "can_use_tool":
        return Requested(request, subtype)
    return Requested(request, subtype, tool=_text(question.get("tool_name")), input=_mapping(question.get("input")))


def _control_withdrawn(frame: _Frame) -> Meaning | None:
    return RequestWithdrawn(frame.request_id) if isinstance(frame.request_id, str) else _NOISE


_MEANINGS: dict[str, Callable[[_Frame], Meaning | None]] = {
    "assistant": _progress,
    "user": _progress,
    "stream_event": _progress,
    "system": _system,
    "command_lifecycle": _lifecycle,
    "result": _result,
    "control_response": _control_reply,
    "control_request": _control_asked,
    "control_cancel_request": _control_withdrawn,
}


def _refs(frame: _Frame) -> tuple[str, ...]:
    """The prompts it names. The single name is the last of several, and what older versions have."""
    return _texts(frame.user_message_uuids) or _texts([frame.user_message_uuid])


def _origin(frame: _Frame) -> str | None:
    kind = (_mapping(frame.origin) or {}).get("kind")
    return kind if isinstance(kind, str) and kind != "human" else None


def _is_aborted(frame: _Frame) -> bool:
    return (_text(frame.terminal_reason) or "").startswith("aborted")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...]:
    items = cast(list[Any], value) if isinstance(value, list) else []
    return tuple(item for item in items if isinstance(item, str))


def _mapping(value: Any) -> dict[str, Any] | None:
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    # An int of JSON may be larger than any float.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


# -- frames out ------------------------------------------------------------------------------------------------------
def _line(frame: dict[str, Any]) -> bytes:
    """One line: JSON escapes every newline inside a text."""
    try:
        line = msgspec.json.encode(frame)
    except UnicodeEncodeError as exc:
        hint = "half of a surrogate pair is no text; decode with errors='replace'"
        raise UsageError(f"this cannot be sent as UTF-8: {exc.reason}", hint=hint) from exc
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise UsageError(f"this cannot be sent as JSON: {exc}", hint="text, numbers, lists and dicts") from exc
    assert b"\n" not in line
    return line + b"\n"


def _control_request(request: str, body: dict[str, Any]) -> bytes:
    return _line({"type": "control_request", "request_id": request, "request": body})


def _flag(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"--{name} cannot be {value!r:.60}", hint="text that is not empty, or None")
    return f"--{name}={value}"


def _content(prompt: Any) -> str | list[dict[str, Any]]:
    """A prompt as the agent takes it: text, or blocks."""
    hint = "text, or a list of ACP content blocks"
    if isinstance(prompt, str):
        # The model's API takes no empty text: the agent would fail on it, or wait.
        if not prompt:
            raise UsageError("the prompt is empty", hint=hint)
        return prompt
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt cannot be {prompt!r:.60}", hint=hint)
    blocks = [_block(block) for block in cast(Sequence[Any], prompt)]
    if not blocks:
        raise UsageError("the prompt has no blocks", hint=hint)
    return blocks


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        raise UsageError(f"a content block cannot be {block!r:.60}", hint='a mapping with a "type"')
    members = cast(Mapping[str, Any], block)
    match members.get("type"):
        case "text":
            return {"type": "text", "text": _member(members, "text")}
        case "image":
            media_type, data = _member(members, "mimeType"), _member(members, "data")
            return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}
        case "resource_link":
            return {"type": "text", "text": f"[@{members.get('name') or 'file'}]({_member(members, 'uri')})"}
        case "resource":
            resource = members.get("resource")
            if not isinstance(resource, Mapping):
                raise UsageError("a resource block has no resource", hint='"resource": {"uri": …, "text": …}')
            inner = cast(Mapping[str, Any], resource)
            uri, text = _member(inner, "uri"), _member(inner, "text")
            return {"type": "text", "text": f'<context ref="{uri}">\n{text}\n</context>'}
        case unknown:
            hint = "text, image, resource with a text, or resource_link"
            raise UsageError(f"this agent takes no content of type {unknown!r:.60}", hint=hint)


def _member(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise UsageError(f"the {name} of a content block cannot be {value!r:.60}", hint="text")
    return value
