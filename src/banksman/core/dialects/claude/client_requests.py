"""Requests that Claude Code sends to Banksman: translate them, and build the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from banksman.core.dialects.claude import writer
from banksman.core.dialects.dialect import Decision, Verdict
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.wire.partial_json import mapping, text

# Where the agent can store a permission, by Banksman's word for the place.
REMEMBER = {
    "session": "session",
    "local": "localSettings",
    "project": "projectSettings",
    "user": "userSettings",
}


def requested(request: str, asked: Mapping[str, Any]) -> Requested:
    """Translate a request. `request`: its id."""
    subtype = text(asked.get("subtype")) or ""
    given = mapping(asked.get("input"))
    match subtype:
        case "can_use_tool" if isinstance(asked.get("tool_name"), str):
            details = {
                name: value
                for name, value in asked.items()
                if name not in ("subtype", "tool_name", "input")
            }
            return Requested(
                request, RequestPurpose.PERMISSION, subtype, asked["tool_name"], given, details
            )
        case "hook_callback" if asked.get("callback_id") == writer.RULES_HOOK:
            tool = text(given.get("tool_name")) or ""
            return Requested(
                request, RequestPurpose.RULING, subtype, tool, mapping(given.get("tool_input"))
            )
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


def answer(asked: Requested, decision: Decision) -> bytes:
    """Write the answer to a permission request or an elicitation."""
    if asked.wants is RequestPurpose.ELICITATION:
        body: dict[str, Any] = {"action": "accept" if decision.allows else "decline"}
        if decision.allows:
            body["content"] = dict(decision.content or {})
    elif decision.allows:
        given = asked.input if decision.updated_input is None else decision.updated_input
        body = {"behavior": "allow", "updatedInput": dict(given)}
        if decision.remember is not None:
            body["updatedPermissions"] = _remembered(asked, decision.remember)
    else:
        body = {"behavior": "deny", "message": decision.message or "denied"}
        if decision.interrupts:
            body["interrupt"] = True
    return writer.control_response(asked.request, body)


def _remembered(asked: Requested, where: str) -> list[dict[str, Any]]:
    """Return the permissions to store: the agent's suggestions, or a rule for the whole tool."""
    destination = REMEMBER[where]
    suggested = asked.details.get("permission_suggestions")
    items = cast(list[Any], suggested) if isinstance(suggested, list) else []
    kept = [
        {**cast(dict[str, Any], item), "destination": destination}
        for item in items
        if isinstance(item, dict)
    ]
    if kept:
        return kept
    rules = [{"toolName": asked.tool}]
    return [{"type": "addRules", "rules": rules, "behavior": "allow", "destination": destination}]


def ruling(asked: Requested, verdict: Verdict | None) -> bytes:
    """Write the verdict of the rules; None leaves the decision to the agent's settings."""
    if verdict is None:
        return writer.control_response(asked.request, {})
    decided = {
        "hookEventName": "PreToolUse",
        "permissionDecision": verdict.value,
        "permissionDecisionReason": (
            f"a rule of this session says {verdict.value!r} for {asked.tool}"
        ),
    }
    return writer.control_response(asked.request, {"hookSpecificOutput": decided})


def respond(asked: Requested, response: Mapping[str, Any]) -> bytes:
    """Write the value that a caller's hook or tool returned."""
    body = {"mcp_response": dict(response)} if asked.wants is RequestPurpose.TOOL else response
    return writer.control_response(asked.request, body)
