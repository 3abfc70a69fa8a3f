"""Requests that an ACP agent sends to Banksman: translate all, answer permissions and forms.

Work with files and terminals is only translated: `sessions/workspace/` does it and gives the
result. All other requests are labelled UNKNOWN. `conversation.py` sends the answers and refusals.

The answer to a permission request is one of the options that came with it. A caller's plain "allow"
or "deny" selects the nearest option. If the agent offers no matching option, the answer is
"cancelled", never the opposite of the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banksman.core.dialects.dialect import Decision, Quirks
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.wire.jsonrpc import INTERNAL_ERROR, METHOD_NOT_FOUND, RpcCall, id_text
from banksman.core.wire.partial_json import mapping, mappings, text

PERMISSION = "session/request_permission"
ELICITATION = "elicitation/create"

# Maximum number of tool calls in one turn whose kind is remembered.
TOOLS_MAX = 64
TOOL_CHARACTERS_MAX = 1024

# Option kinds for each decision, in order of preference.
_ONCE, _ALWAYS = ("allow_once", "allow_always"), ("allow_always", "allow_once")
_NO = ("reject_once", "reject_always")

# The rules of a session treat a client service as a tool, of the kind that the agent's own tool
# would have.
_SERVED = {"terminal/create": "execute", "fs/write_text_file": "edit", "fs/read_text_file": "read"}

Answer = dict[str, Any]


def requested(call: RpcCall, quirks: Quirks, kinds: Mapping[str, str]) -> Requested:
    """Translate a request. `kinds`: the kinds of tool calls that were reported before."""
    params = call.named
    request = id_text(call.id)
    match call.method:
        case "session/request_permission":
            tool = mapping(params.get("toolCall"))
            given = tool.get("rawInput")
            # Fields that `Requested` carries elsewhere are not repeated. An input that is no
            # mapping stays in the details.
            told = {"kind"} | ({"rawInput"} if isinstance(given, dict) else set[str]())
            details = {name: value for name, value in tool.items() if name not in told}
            details["options"] = _options(params)
            kind = (
                text(tool.get("kind")) or kinds.get(text(tool.get("toolCallId")) or "") or "other"
            )
            return Requested(
                request, RequestPurpose.PERMISSION, call.method, kind, mapping(given), details
            )
        case "elicitation/create" if params.get("mode", "form") == "form":
            return Requested(request, RequestPurpose.ELICITATION, call.method, details=params)
        case method if method.partition("/")[0] in quirks.serves and "/" in method:
            return Requested(
                request, RequestPurpose.WORKSPACE, method, _SERVED.get(method, ""), params
            )
        case _:
            return Requested(request, RequestPurpose.UNKNOWN, call.method)


def with_tool(
    tools: tuple[tuple[str, str], ...], update: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Return the remembered kinds of tool calls, with the call of one more update."""
    call, kind = text(update.get("toolCallId")), text(update.get("kind"))
    if call is None or kind is None or len(call) + len(kind) > TOOL_CHARACTERS_MAX:
        return tools
    return (*(pair for pair in tools if pair[0] != call), (call, kind))[-TOOLS_MAX:]


def decided(asked: Requested, decision: Decision) -> Answer:
    """Return the answer for a caller's decision."""
    if asked.wants is RequestPurpose.ELICITATION:
        return (
            {"action": "accept", "content": dict(decision.content or {})}
            if decision.allows
            else _DECLINED
        )
    option = _chosen(asked, decision)
    return CANCELLED if option is None else {"outcome": {"outcome": "selected", "optionId": option}}


def dismissed(asked: Requested) -> Answer | None:
    """Return the answer for a request that gets no decision; None means that only an error fits."""
    match asked.wants:
        case RequestPurpose.PERMISSION:
            return CANCELLED
        case RequestPurpose.ELICITATION:
            return _DISMISSED
        case _:
            return None


def error_code(asked: Requested) -> int:
    """Return the JSON-RPC error code of a refusal."""
    return METHOD_NOT_FOUND if asked.wants is RequestPurpose.UNKNOWN else INTERNAL_ERROR


CANCELLED: Answer = {"outcome": {"outcome": "cancelled"}}
_DECLINED: Answer = {"action": "decline"}
_DISMISSED: Answer = {"action": "cancel"}


def _chosen(asked: Requested, decision: Decision) -> str | None:
    # ACP cannot carry a replaced input. The session rejects this decision earlier (`takes_input`),
    # so the original input never runs in place of the changed one.
    assert decision.updated_input is None
    options = mappings(asked.details.get("options"))
    if decision.option is not None and any(
        option["optionId"] == decision.option for option in options
    ):
        return decision.option
    if not decision.allows:
        wanted = _NO
    else:
        wanted = _ONCE if decision.remember is None else _ALWAYS
    return next(
        (option["optionId"] for kind in wanted for option in options if option.get("kind") == kind),
        None,
    )


def _options(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options that have a usable id."""
    return [
        option
        for option in mappings(params.get("options"))
        if isinstance(option.get("optionId"), str)
    ]
