"""The members of a frame of Claude Code that matter to a turn.

A bad value invalidates its member and not the frame.
"""

from __future__ import annotations

from typing import Any

import msgspec

from banksman.core.wire.partial_json import Members, mapping, text, texts

CONVERSATION_CHARACTERS_MAX = 256


class ClaudeFrame(msgspec.Struct, gc=False):
    """The members that matter to a turn.

    Only the type is checked, so a bad value invalidates its member and not the frame.
    """

    type: str = ""
    subtype: Any = None
    session_id: Any = None
    origin: Any = None
    # assistant, user; stream_event
    message: Any = None
    event: Any = None
    api_message_id: Any = None
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
    api_error: Any = None
    api_error_type: Any = None
    # system with `api_retry`
    attempt: Any = None
    max_retries: Any = None
    retry_delay_ms: Any = None
    error_status: Any = None
    error: Any = None
    # rate_limit_event
    rate_limit_info: Any = None


decode = msgspec.json.Decoder(ClaudeFrame).decode


def picked(members: Members, kind: str) -> ClaudeFrame:
    rest = {name: members.get(name) for name in ClaudeFrame.__struct_fields__ if name != "type"}
    return ClaudeFrame(type=kind, **rest)


def refs_of(frame: ClaudeFrame) -> tuple[str, ...]:
    """Return the refs that a frame names.

    The single name is the last of several, and the only member that older versions send.
    """
    return texts(frame.user_message_uuids) or texts([frame.user_message_uuid])


def origin_of(frame: ClaudeFrame) -> str | None:
    kind = mapping(frame.origin).get("kind")
    return kind if isinstance(kind, str) and kind != "human" else None


def is_aborted(frame: ClaudeFrame) -> bool:
    return (text(frame.terminal_reason) or "").startswith("aborted")


def conversation_of(frame: ClaudeFrame) -> str | None:
    """Return the conversation id if it is usable. It becomes a word of a command line."""
    name = text(frame.session_id)
    return (
        name if name and len(name) <= CONVERSATION_CHARACTERS_MAX and name.isprintable() else None
    )
