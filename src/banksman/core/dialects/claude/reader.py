"""Read one line of Claude Code (stream-json of version 2.1) and return its meaning for the turn.

Each line is one JSON object.

**Start and end of a turn.** A prompt carries a UUID that Banksman creates. The agent reports on
that UUID in `command_lifecycle` (queued, started, completed or cancelled). It also names the UUID
in the `system/init` that opens each turn, and in the `result` that is its boundary. Waiting prompts
are merged, and then one init and one result name several. An init or a result that names no prompt
of Banksman is a turn of the agent's own. The agent obeys an interrupt only after the init. Before
the init, it acknowledges an interrupt and continues. The acknowledgement comes first, then the
aborted result.

**Errors.** A result reports an error in `is_error` and in `subtype`, and the two disagree: a failed
model call is "success" with `is_error`. Either counts as an error.

**Order of members.** The members of an object have no fixed order: a result has its `type` near its
end. Only the frequent frames are recognised by their first bytes, and only where these bytes decide
everything.

**Undecodable lines** are noise, unless the line is still an object. Then its members are read one
at a time (see core/wire/partial_json.py), because a lost boundary means a turn that never ends.

**Cost** per plain token frame: a comparison of its first bytes. For any other frame: one decode of
the members below. The decoder skips everything else.

**Usage.** The frames of a message repeat the tokens of its model call: the input is right from the
start, the output only in the `message_delta` at the end of the call. The result has the tokens of
the turn, and those of its subagents in the usage by model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from banksman.core.dialects.claude import client_requests, provider_errors, writer
from banksman.core.dialects.claude.frame import (
    ClaudeFrame,
    conversation_of,
    decode,
    is_aborted,
    origin_of,
    picked,
    refs_of,
)
from banksman.core.dialects.meaning import (
    BackgroundTask,
    Meaning,
    Noise,
    PromptSettled,
    PromptTaken,
    ProviderFailure,
    Replied,
    RequestWithdrawn,
    TasksChanged,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import NO_TOKENS, Tokens, tokens_in
from banksman.core.wire.elided_text import cut
from banksman.core.wire.framing import HEAD_BYTES
from banksman.core.wire.partial_json import (
    UNDECODABLE,
    items,
    mapping,
    mappings,
    mended,
    number,
    split,
    text,
    texts,
)
from banksman.errors import ErrorKind

# A longer undecodable line is judged by its head, because reading members takes a Python step for
# each token.
SALVAGE_BYTES_MAX = 1 << 20


# Frames that are only content of the turn. The first bytes decide, because a JSON writer does not
# repeat a member. A few of these frames mean more. A quoted word marks them, and this word cannot
# occur inside a text, where its quotes would be escaped.
_DELTA = b'{"type":"stream_event",'
# Most deltas are a piece of text, which the first bytes also show. A search through each of them
# would cost more than the rest of `read`.
_TEXT_DELTAS = tuple(
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta",'
    % index
    for index in range(4)
)
_THINKING = b'"thinking_delta"'
# The end of a model call, with its tokens.
_CALL_ENDED = b'{"type":"stream_event","event":{"type":"message_delta",'
_HEARD = b'{"type":"user",'
_TOOL_RESULT = b'"tool_result"'
_SAID = b'{"type":"assistant",'
_TOOL_USE = b'"tool_use"'
_USAGE = b'"usage"'

# The agent is compacting the conversation. It is silent for minutes, as if a tool ran.
_COMPACTION = "compaction"

# System frames that prove progress. Not among them: `status` (a request was sent, without a result
# yet), `thinking_tokens` (see `Thought`) and
# `session_state_changed` (a state, no step).
_PROGRESS = frozenset(
    (
        *("permission_denied", "hook_started", "hook_progress", "hook_response"),
        *(
            "task_started",
            "task_progress",
            "task_updated",
            "task_notification",
            "local_command_output",
        ),
    )
)

_NOISE = Noise()
_THOUGHT = Thought()
# Length of the description of a background task: it may be a whole shell command.
DESCRIPTION_CHARACTERS_MAX = 200


def read(line: bytes) -> Meaning | None:
    """Return the meaning of a line; None if the line is only content of the turn. Never raises."""
    if line.startswith(_TEXT_DELTAS):
        return None
    if line.startswith(_DELTA) and not line.startswith(_CALL_ENDED):
        return _THOUGHT if _THINKING in line else None
    # `find`, because `in` first checks whether the bytes are a number.
    if line.startswith(_HEARD) and line.find(_TOOL_RESULT) < 0:
        return None
    if line.startswith(_SAID) and line.find(_USAGE) < 0 and line.find(_TOOL_USE) < 0:
        return None
    try:
        frame = decode(line)
    except UNDECODABLE:
        return _salvaged(line)
    meaning_of = _MEANINGS.get(frame.type)
    return _NOISE if meaning_of is None else meaning_of(frame)


def read_head(head: bytes, tail: bytes = b"") -> Meaning | None:
    """Return the meaning of a line too long to keep, judged by its head. Never raises.

    A line that may be the boundary counts as the boundary.
    """
    members = split(head)
    if not members.is_object:
        return _NOISE
    kind = members.get("type")
    if not isinstance(kind, str):
        if "type" in members.found or members.is_whole:
            return _NOISE
        # The type comes later in the line, as in every result.
        kind = "result"
    if kind == "result":
        frame = picked(members, kind)
        return TurnOver(
            refs=refs_of(frame),
            origin=origin_of(frame),
            conversation=conversation_of(frame),
            is_error=True,
            is_aborted=is_aborted(frame),
            error="frame_too_large",
            stop_reason=text(frame.stop_reason),
            usage=mapping(frame.usage) or None,
            spent=number(frame.total_cost_usd),
            tokens=tokens_in(mapping(frame.usage)),
            failure=ProviderFailure(ErrorKind.PROTOCOL),
        )
    meaning_of = _MEANINGS.get(kind)
    if meaning_of is None:
        return _NOISE
    frame = picked(members, kind)
    # The agent waits, so even a request this large needs an answer: a refusal.
    if frame.request is None:
        inner = members.within("request")
        frame.request = {"subtype": inner.get("subtype")}
        if inner.get("callback_id") == writer.RULES_HOOK:
            # An error would count as a failed hook, and the agent might continue. The tool's name
            # is enough to apply the rules.
            given = {"tool_name": inner.within("input").get("tool_name")}
            frame.request |= {"callback_id": writer.RULES_HOOK, "input": given}
    if frame.response is None:
        inner = members.within("response")
        frame.response = {name: inner.get(name) for name in ("subtype", "request_id", "error")}
    return meaning_of(frame)


def _salvaged(line: bytes) -> Meaning | None:
    """Return the meaning of a line that did not decode. Most of these lines are not JSON."""
    better = mended(line)
    if better is not None:
        line = better
    try:
        frame = decode(line)
    except (msgspec.ValidationError, RecursionError):
        # The line is JSON as far as it was read, but no object, too deep, or with an invalid
        # number.
        if len(line) > SALVAGE_BYTES_MAX:
            return read_head(line[:HEAD_BYTES])
        members = split(line)
        kind = members.get("type")
        if not members.is_whole or not isinstance(kind, str):
            return _NOISE
        frame = picked(members, kind)
    except UNDECODABLE:
        return _NOISE
    meaning_of = _MEANINGS.get(frame.type)
    return _NOISE if meaning_of is None else meaning_of(frame)


def _delta(frame: ClaudeFrame) -> Meaning | None:
    event = mapping(frame.event)
    if event.get("type") == "message_delta":
        return _reported(frame.api_message_id, event.get("usage"))
    delta = mapping(event.get("delta")) or {}
    return _THOUGHT if delta.get("type") == "thinking_delta" else None


def _output(frame: ClaudeFrame) -> Meaning | None:
    calls = tuple(
        call for block in _blocks(frame, "tool_use") if (call := text(block.get("id"))) is not None
    )
    message = mapping(frame.message)
    reported = _reported(message.get("id"), message.get("usage"))
    return ToolBegan(calls, reported) if calls else reported


def _reported(call: Any, usage: Any) -> UsageReported | None:
    tokens = tokens_in(mapping(usage))
    return None if tokens is None else UsageReported(text(call) or "", tokens)


def _heard(frame: ClaudeFrame) -> Meaning | None:
    blocks = _blocks(frame, "tool_result")
    calls = tuple(call for block in blocks if (call := text(block.get("tool_use_id"))) is not None)
    return ToolEnded(calls) if calls else None


def _blocks(frame: ClaudeFrame, kind: str) -> list[dict[str, Any]]:
    content = mapping(frame.message).get("content")
    return [block for block in mappings(content) if block.get("type") == kind]


def _system(frame: ClaudeFrame) -> Meaning | None:
    if frame.subtype == "init":
        return TurnOpened(
            refs=refs_of(frame),
            origin=origin_of(frame),
            conversation=conversation_of(frame),
            can_interrupt=True,
        )
    match frame.subtype:
        case "thinking_tokens":
            return _THOUGHT
        case "api_retry":
            names = ("attempt", "max_retries", "retry_delay_ms", "error_status", "error")
            return provider_errors.retrying({name: getattr(frame, name) for name in names})
        case "background_tasks_changed":
            tasks = (_task(mapping(task)) for task in items(frame.tasks))
            return TasksChanged(tuple(task for task in tasks if task is not None))
        case "status" if frame.status == "compacting":
            return ToolBegan((_COMPACTION,))
        case "compact_boundary":
            return ToolEnded((_COMPACTION,))
        case "status" if frame.compact_result is not None:
            return ToolEnded((_COMPACTION,))  # A failed compaction has no `compact_boundary`.
        case str(subtype) if subtype in _PROGRESS:
            return None
        case _:
            return _NOISE


def _task(task: Mapping[str, Any]) -> BackgroundTask | None:
    id = text(task.get("task_id"))
    if id is None:
        return None
    kind, description = text(task.get("task_type")) or "", text(task.get("description")) or ""
    return BackgroundTask(id, kind, cut(description, DESCRIPTION_CHARACTERS_MAX))


def _lifecycle(frame: ClaudeFrame) -> Meaning | None:
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


def _result(frame: ClaudeFrame) -> Meaning | None:
    subtype = text(frame.subtype) or ""
    is_error = frame.is_error is True or subtype.startswith("error")
    error = _error(frame) if is_error else None
    failure = None if error is None else _failure(frame, error)
    return TurnOver(
        refs=refs_of(frame),
        origin=origin_of(frame),
        conversation=conversation_of(frame),
        is_error=is_error,
        is_aborted=is_aborted(frame),
        is_overflow=failure is not None and failure.kind is ErrorKind.CONTEXT_OVERFLOW,
        # The result of an interrupted turn may have no text.
        text=text(frame.result),
        structured=frame.structured_output,
        error=error,
        stop_reason=text(frame.stop_reason),
        usage=mapping(frame.usage) or None,
        spent=number(frame.total_cost_usd),
        cost=_cost(frame),
        tokens=_tokens(frame),
        failure=failure,
    )


def _tokens(frame: ClaudeFrame) -> Tokens | None:
    """Return the tokens of this turn: of all models if the agent reports them, else of the main."""
    models = mapping(frame.model_usage_since_last_result)
    found = [tokens for model in models.values() if (tokens := tokens_in(mapping(model)))]
    if not found:
        return tokens_in(mapping(frame.usage))
    return functools.reduce(Tokens.plus, found, NO_TOKENS)


def _failure(frame: ClaudeFrame, error: str) -> ProviderFailure:
    return provider_errors.failure(
        error,
        subtype=frame.subtype,
        terminal_reason=frame.terminal_reason,
        api_error=frame.api_error,
        api_error_type=frame.api_error_type,
        api_error_status=frame.api_error_status,
    )


def _limits(frame: ClaudeFrame) -> Meaning | None:
    return provider_errors.limits(mapping(frame.rate_limit_info)) or _NOISE


def _cost(frame: ClaudeFrame) -> float | None:
    """Return the cost of this turn alone, if the agent reports it.

    The total is no substitute: it continues through a resume and falls back after a kill.
    """
    models = frame.model_usage_since_last_result
    costs = [number(mapping(model).get("costUSD")) for model in mapping(models).values()]
    if not isinstance(models, dict) or None in costs:
        return None
    return sum((cost for cost in costs if cost is not None), 0.0)


def _error(frame: ClaudeFrame) -> str:
    """Return the most informative error text.

    The order is: the text for the user, the list of errors, the words for the kind of end.
    """
    said = text(frame.result) or "\n".join(texts(frame.errors))
    if said:
        return said
    words = (frame.subtype, frame.terminal_reason, frame.api_error_status)
    return (
        " ".join(str(word) for word in words if isinstance(word, str | int) and word != "success")
        or "error"
    )


def _control_reply(frame: ClaudeFrame) -> Meaning | None:
    response = mapping(frame.response)
    request = response.get("request_id")
    if not isinstance(request, str):
        return _NOISE
    if response.get("subtype") != "success":
        return Replied(request, error=text(response.get("error")) or "the agent gave no reason")
    receipt = mapping(response.get("response"))
    return Replied(request, still_queued=texts(receipt.get("still_queued")))


def _control_asked(frame: ClaudeFrame) -> Meaning | None:
    # A request without an id cannot be answered.
    if not isinstance(frame.request_id, str):
        return _NOISE
    return client_requests.requested(frame.request_id, mapping(frame.request))


def _control_withdrawn(frame: ClaudeFrame) -> Meaning | None:
    return RequestWithdrawn(frame.request_id) if isinstance(frame.request_id, str) else _NOISE


_MEANINGS: dict[str, Callable[[ClaudeFrame], Meaning | None]] = {
    "assistant": _output,
    "user": _heard,
    "stream_event": _delta,
    "system": _system,
    "command_lifecycle": _lifecycle,
    "result": _result,
    "rate_limit_event": _limits,
    "control_response": _control_reply,
    "control_request": _control_asked,
    "control_cancel_request": _control_withdrawn,
}
