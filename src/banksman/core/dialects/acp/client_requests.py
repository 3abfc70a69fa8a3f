"""What an ACP agent asks of its client, and how it is answered.

Each request has exactly one answer. A permission is one of the options that came with the question; who says only
"allow" or "deny" gets the nearest of them, and an agent that offers none of that sort is told "cancelled", never the
opposite of what was said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banksman.core.dialects.dialect import Quirks
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session.permissions import Decision
from banksman.core.wire.jsonrpc import INTERNAL_ERROR, METHOD_NOT_FOUND, RpcCall, id_text
from banksman.core.wire.partial_json import mapping, mappings, text

PERMISSION = "session/request_permission"
ELICITATION = "elicitation/create"

# Tools of one turn of which the kind is remembered.
TOOLS_MAX = 64
TOOL_CHARACTERS_MAX = 1024

# What a permission may say, nearest first.
_ONCE, _ALWAYS = ("allow_once", "allow_always"), ("allow_always", "allow_once")
_NO = ("reject_once", "reject_always")

# What is served by us is a tool for the rules of a session, of the kind that it would be if the agent had it.
_SERVED = {"terminal/create": "execute", "fs/write_text_file": "edit", "fs/read_text_file": "read"}

Answer = dict[str, Any]


def requested(call: RpcCall, quirks: Quirks, kinds: Mapping[str, str]) -> Requested:
    """The request in the common tongue. `kinds`: those of the tools that were told of before."""
    params = call.named
    request = id_text(call.id)
    match call.method:
        case "session/request_permission":
            tool = mapping(params.get("toolCall"))
            given = tool.get("rawInput")
            # What stands elsewhere is not told twice; an input of another shape is still told.
            told = {"kind"} | ({"rawInput"} if isinstance(given, dict) else set[str]())
            details = {name: value for name, value in tool.items() if name not in told}
            details["options"] = _options(params)
            kind = text(tool.get("kind")) or kinds.get(text(tool.get("toolCallId")) or "") or "other"
            return Requested(request, RequestPurpose.PERMISSION, call.method, kind, mapping(given), details)
        case "elicitation/create" if params.get("mode", "form") == "form":
            return Requested(request, RequestPurpose.ELICITATION, call.method, details=params)
        case method if method.partition("/")[0] in quirks.serves and "/" in method:
            return Requested(request, RequestPurpose.WORKSPACE, method, _SERVED.get(method, ""), params)
        case _:
            return Requested(request, RequestPurpose.UNKNOWN, call.method)


def with_tool(tools: tuple[tuple[str, str], ...], update: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The kinds of tools that were told of, with one more."""
    call, kind = text(update.get("toolCallId")), text(update.get("kind"))
    if call is None or kind is None or len(call) + len(kind) > TOOL_CHARACTERS_MAX:
        return tools
    return (*(pair for pair in tools if pair[0] != call), (call, kind))[-TOOLS_MAX:]


def decided(asked: Requested, decision: Decision) -> Answer:
    if asked.wants is RequestPurpose.ELICITATION:
        return {"action": "accept", "content": dict(decision.content or {})} if decision.allows else _DECLINED
    option = _chosen(asked, decision)
    return CANCELLED if option is None else {"outcome": {"outcome": "selected", "optionId": option}}


def dismissed(asked: Requested) -> Answer | None:
    """The answer of somebody who does not answer; None: there is none but an error."""
    match asked.wants:
        case RequestPurpose.PERMISSION:
            return CANCELLED
        case RequestPurpose.ELICITATION:
            return _DISMISSED
        case _:
            return None


def error_code(asked: Requested) -> int:
    return METHOD_NOT_FOUND if asked.wants is RequestPurpose.UNKNOWN else INTERNAL_ERROR


CANCELLED: Answer = {"outcome": {"outcome": "cancelled"}}
_DECLINED: Answer = {"action": "decline"}
_DISMISSED: Answer = {"action": "cancel"}


def _chosen(asked: Requested, decision: Decision) -> str | None:
    # ACP cannot say "but with this instead": who asks for that is told so, and what was changed never runs as it was.
    assert decision.updated_input is None
    options = mappings(asked.details.get("options"))
    if decision.option is not None and any(option["optionId"] == decision.option for option in options):
        return decision.option
    if not decision.allows:
        wanted = _NO
    else:
        wanted = _ONCE if decision.remember is None else _ALWAYS
    return next((option["optionId"] for kind in wanted for option in options if option.get("kind") == kind), None)


def _options(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that can be chosen."""
    return [option for option in mappings(params.get("options")) if isinstance(option.get("optionId"), str)]
