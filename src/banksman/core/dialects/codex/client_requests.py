"""Requests that Codex sends to Banksman: translate them, and build the results for answers.

**Permissions.** The agent asks before a command, a change of files, or an extension of its rights.
It lists the decisions that it accepts, and each becomes an option in ACP's terms. It accepts a
plain `decline` even if it does not list it. `cancel` declines and ends the turn. Questions of an
MCP server, or of the agent itself, are elicitations.

**Other requests** (the time, a token, a client tool) are only labelled UNKNOWN here, because
Banksman does not offer these services. The session refuses them through `conversation.py`, and the
agent continues without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banksman.core.dialects.dialect import Decision
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import RpcCall
from banksman.core.wire.partial_json import items, mapping, text

COMMAND = "item/commandExecution/requestApproval"
FILES = "item/fileChange/requestApproval"
RIGHTS = "item/permissions/requestApproval"
INPUT = "item/tool/requestUserInput"
ELICITATION = "mcpServer/elicitation/request"
# The same requests in an older version of the protocol.
OLD_COMMAND = "execCommandApproval"
OLD_FILES = "applyPatchApproval"

# Name of the tool for the rules of a session: the type of its item, if it has one.
_TOOLS = {
    COMMAND: "commandExecution",
    FILES: "fileChange",
    RIGHTS: "permissions",
    OLD_COMMAND: "commandExecution",
    OLD_FILES: "fileChange",
}
# Parameters that are the input of the tool. All others are details.
_INPUTS = {
    COMMAND: ("command", "cwd", "networkApprovalContext"),
    FILES: ("itemId", "grantRoot"),
    RIGHTS: ("permissions", "cwd"),
    OLD_COMMAND: ("command", "cwd"),
    OLD_FILES: ("fileChanges", "grantRoot"),
}
_KINDS = {
    "accept": "allow_once",
    "acceptForSession": "allow_always",
    "acceptWithExecpolicyAmendment": "allow_always",
    "decline": "reject_once",
    "cancel": "reject_once",
}
_NAMES = {
    "accept": "Allow",
    "acceptForSession": "Allow for this session",
    "acceptWithExecpolicyAmendment": "Allow this and similar commands",
    "applyNetworkPolicyAmendment": "Remember for this host",
    "decline": "Reject",
    "cancel": "Reject and stop",
}
_USUAL = ("accept", "acceptForSession", "decline", "cancel")
_OLD_WORDS = {
    "accept": "approved",
    "acceptForSession": "approved_for_session",
    "decline": "denied",
    "cancel": "abort",
}


def requested(call: RpcCall) -> Requested:
    """Translate a request of the agent."""
    request, method, params = jsonrpc.id_text(call.id), call.method, call.named
    if method in _TOOLS:
        given = {name: params[name] for name in _INPUTS[method] if params.get(name) is not None}
        details = {
            name: value for name, value in params.items() if name not in given and value is not None
        }
        details |= {"title": _title(given, params), "options": _options(call)}
        return Requested(request, RequestPurpose.PERMISSION, method, _TOOLS[method], given, details)
    if method == ELICITATION:
        return Requested(
            request,
            RequestPurpose.ELICITATION,
            method,
            text(params.get("serverName")) or "",
            {},
            params,
        )
    if method == INPUT:
        return Requested(
            request, RequestPurpose.ELICITATION, method, "requestUserInput", {}, params
        )
    return Requested(request, RequestPurpose.UNKNOWN, method)


def _title(given: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    command = given.get("command")
    if isinstance(command, list):
        command = " ".join(word for word in items(command) if isinstance(word, str))
    return text(command) or text(params.get("reason")) or ""


def _options(call: RpcCall) -> list[dict[str, str]]:
    offered = [
        name
        for decision in items(call.named.get("availableDecisions"))
        if (name := _name(decision))
    ]
    if not offered:
        offered = [name for name in _USUAL if call.method != RIGHTS or name != "cancel"]
    elif "decline" not in offered:
        offered.insert(len(offered) - (offered[-1] == "cancel"), "decline")
    decisions = _decisions(call.named)
    return [
        {"optionId": name, "name": _NAMES[name], "kind": _kind(name, decisions.get(name))}
        for name in offered
    ]


def _decisions(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered decisions by name. Some carry a rule to remember."""
    return {
        name: decision
        for decision in items(params.get("availableDecisions"))
        if (name := _name(decision))
    }


def _name(decision: Any) -> str | None:
    """Return the name of a decision, or None if it is unknown."""
    word = decision if isinstance(decision, str) else next(iter(mapping(decision)), None)
    return word if word in _NAMES else None


def _kind(name: str, decision: Any) -> str:
    if name == "applyNetworkPolicyAmendment":
        amendment = mapping(mapping(mapping(decision).get(name)).get("network_policy_amendment"))
        return "reject_always" if amendment.get("action") == "deny" else "allow_always"
    return _KINDS[name]


# -- answers -------------------------------------------------------------------------------------
def answer(asked: Requested, decision: Decision) -> dict[str, Any]:
    """Return the result for a caller's decision."""
    match asked.subtype:
        case "item/tool/requestUserInput":
            return {"answers": _entered(decision) if decision.allows else {}}
        case "mcpServer/elicitation/request":
            content = dict(decision.content or {}) if decision.allows else None
            return {"action": "accept" if decision.allows else "decline", "content": content}
        case _:
            return _decided(asked, _chosen(asked, decision))


def cancelled(asked: Requested) -> dict[str, Any]:
    """Return the result for a request that gets no decision, because its turn is being stopped."""
    match asked.subtype:
        case "item/tool/requestUserInput":
            return {"answers": {}}
        case "mcpServer/elicitation/request":
            return {"action": "cancel", "content": None}
        case _:
            return _decided(asked, "cancel")


def _entered(decision: Decision) -> dict[str, Any]:
    """Return the user's input for each question: one answer or several."""
    content = decision.content or {}
    return {
        name: {"answers": [str(each) for each in items(value) or [value]]}
        for name, value in content.items()
    }


def _chosen(asked: Requested, decision: Decision) -> str:
    """Return the name of a decision: the chosen option, or the nearest one offered."""
    # Codex cannot carry a replaced input. The session rejects this decision earlier
    # (`takes_input`), so the original input never runs in place of the changed one.
    assert decision.updated_input is None
    offered = {
        option["optionId"]: option["kind"]
        for option in map(mapping, items(asked.details.get("options")))
    }
    if decision.option in offered:
        assert decision.option is not None
        return decision.option
    if not decision.allows:
        return "cancel" if decision.interrupts else "decline"
    if decision.remember is not None:
        # Codex writes the amendment to the user's files, so a decision for the session must not use
        # it. Codex accepts `acceptForSession` even if it does not offer it.
        lasting = "acceptWithExecpolicyAmendment"
        return (
            lasting if decision.remember != "session" and lasting in offered else "acceptForSession"
        )
    return "accept"


def _decided(asked: Requested, name: str) -> dict[str, Any]:
    if asked.subtype == RIGHTS:
        allows = name in ("accept", "acceptForSession")
        permissions = mapping(asked.input.get("permissions")) if allows else {}
        return {
            "permissions": permissions,
            "scope": "session" if name == "acceptForSession" else "turn",
        }
    if asked.subtype in (OLD_COMMAND, OLD_FILES):
        return {"decision": _OLD_WORDS.get(name, "denied")}
    return {"decision": _decisions(asked.details).get(name, name)}
