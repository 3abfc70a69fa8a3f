"""Frames that the fake agent writes, in the shapes that Claude Code 2.1.325 was recorded with.

Long parts of the recorded frames are left out.
"""

from __future__ import annotations

import os

from banksman.testing.fake_process import new_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Frame: TypeAlias = dict[str, Any]

VERSION = "2.1.325"
MODEL = "claude-opus-5-5"
TOOLS = ["Task", "Bash", "Edit", "Read"]
CAPABILITIES = ["interrupt_receipt_v1", "interrupt_cancel_queued_v1", "msg_lifecycle_v1"]
REJECTED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected "
    "(eg. if it was a file edit, the new_string was NOT written to the file). "
    "STOP what you are doing and wait for the user to tell you how to proceed."
)
USAGE = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 1,
}


def initialized(request_id: str, mode: str) -> Frame:
    return answered(
        request_id,
        {
            "commands": [
                {"name": "compact", "description": "Compact the conversation", "argumentHint": ""}
            ],
            "agents": [{"name": "claude", "description": "Catch-all"}],
            "output_style": "default",
            "available_output_styles": ["default"],
            "models": [{"value": "default", "resolvedModel": MODEL, "displayName": "Default"}],
            "account": {
                "tokenSource": "none",
                "apiKeySource": "ANTHROPIC_API_KEY",
                "apiProvider": "firstParty",
            },
            "pid": os.getpid(),
            "claude_code_version": VERSION,
            "current_permission_mode": mode,
            "session_state": "idle",
            "capabilities": CAPABILITIES,
        },
    )


def answered(request_id: str, response: Frame) -> Frame:
    return {
        "type": "control_response",
        "response": {"subtype": "success", "request_id": request_id, "response": response},
    }


def refused(request_id: str, error: str, **more: str) -> Frame:
    response = {"subtype": "error", "request_id": request_id, "error": error, **more}
    return {"type": "control_response", "response": response}


def unsupported(request_id: str, subtype: str) -> Frame:
    error = f"Unsupported control request subtype: {subtype}"
    return refused(request_id, error, error_code="unsupported_request")


def lifecycle(command_uuid: str, state: str) -> Frame:
    return {
        "type": "command_lifecycle",
        "command_uuid": command_uuid,
        "state": state,
        "uuid": new_id(),
    }


def init(model: str, mode: str) -> Frame:
    return {
        "type": "system",
        "subtype": "init",
        "cwd": os.getcwd(),
        "tools": TOOLS,
        "mcp_servers": [],
        "model": model,
        "permissionMode": mode,
        "slash_commands": ["compact"],
        "apiKeySource": "ANTHROPIC_API_KEY",
        "claude_code_version": VERSION,
        "output_style": "default",
        "agents": ["claude"],
        "skills": [],
        "plugins": [],
        "capabilities": CAPABILITIES,
        "uuid": new_id(),
    }


def status() -> Frame:
    return {"type": "system", "subtype": "status", "status": "requesting", "uuid": new_id()}


def background_tasks(ids: list[str]) -> Frame:
    tasks = [{"task_id": id, "task_type": "local_bash", "description": f"task {id}"} for id in ids]
    return {
        "type": "system",
        "subtype": "background_tasks_changed",
        "tasks": tasks,
        "uuid": new_id(),
    }


def thinking_tokens() -> Frame:
    return {
        "type": "system",
        "subtype": "thinking_tokens",
        "estimated_tokens": 1,
        "estimated_tokens_delta": 1,
        "uuid": new_id(),
    }


def message(message_id: str, content: list[Frame], model: str) -> Frame:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": USAGE,
    }


def assistant(message_id: str, block: Frame, model: str) -> Frame:
    """Return an assistant frame with one content block; its message has a null stop reason."""
    return {
        "type": "assistant",
        "message": message(message_id, [block], model),
        "parent_tool_use_id": None,
        "uuid": new_id(),
    }


def stream_event(message_id: str, event: Frame) -> Frame:
    return {
        "type": "stream_event",
        "event": event,
        "parent_tool_use_id": None,
        "uuid": new_id(),
        "api_message_id": message_id,
    }


def user(content: list[Frame]) -> Frame:
    return {
        "type": "user",
        "message": {"role": "user", "content": content},
        "parent_tool_use_id": None,
        "uuid": new_id(),
    }


def tool_result(tool_use_id: str, text: str, *, is_error: bool) -> Frame:
    block = {
        "tool_use_id": tool_use_id,
        "type": "tool_result",
        "content": text,
        "is_error": is_error,
    }
    return user([block])


def can_use_tool(request_id: str, tool_use_id: str, name: str, arguments: Frame) -> Frame:
    rules = [{"toolName": name, "ruleContent": str(arguments.get("command", ""))}]
    suggestion = {
        "type": "addRules",
        "rules": rules,
        "behavior": "allow",
        "destination": "localSettings",
    }
    request = {
        "subtype": "can_use_tool",
        "tool_name": name,
        "display_name": name,
        "input": arguments,
        "permission_suggestions": [suggestion],
        "tool_use_id": tool_use_id,
    }
    return control_request(request_id, request)


def control_request(request_id: str, request: Frame) -> Frame:
    return {"type": "control_request", "request_id": request_id, "request": request}


def result(subtype: str, *, is_error: bool, terminal_reason: str | None, index: int) -> Frame:
    """Return the members that all results have. The caller adds the text or the errors."""
    frame: Frame = {
        "type": "result",
        "subtype": subtype,
        "is_error": is_error,
        "duration_ms": 1,
        "duration_api_ms": 1,
        "num_turns": 1,
        "stop_reason": None if is_error else "end_turn",
        "total_cost_usd": 0.0001,
        "usage": USAGE,
        "modelUsage": {},
        "permission_denials": [],
        "uuid": new_id(),
        "queued_turn_count": 0,
        "result_index": index,
    }
    if terminal_reason is not None:
        frame["terminal_reason"] = terminal_reason
    return frame
