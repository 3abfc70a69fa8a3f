"""A question of the agent's as an editor is asked it, and the editor's answer as the server takes it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from banksman.core.wire.jsonrpc import Failure

Option = dict[str, str]

_CALLS = ("toolCallId", "tool_use_id", "itemId")
_TOOL_KINDS = ("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode", "other")
_KINDS = ("allow_once", "allow_always", "reject_once", "reject_always")
# For an agent that offers none of its own. What is allowed for the session is remembered by the agent, and no longer.
_USUAL: tuple[Option, ...] = (
    {"optionId": "allow_once", "name": "Allow", "kind": "allow_once"},
    {"optionId": "allow_always", "name": "Allow for this session", "kind": "allow_always"},
    {"optionId": "reject_once", "name": "Reject", "kind": "reject_once"},
)


def request(session: str, question: Mapping[str, Any], title_of: Callable[[Any], str | None]) -> dict[str, Any]:
    """The parameters of a `session/request_permission`. `title_of`: of a tool call that the editor knows already."""
    call = _tool_call(question)
    title = title_of(call["toolCallId"])
    if title is not None:
        call["title"] = title
    return {"sessionId": session, "toolCall": call, "options": list(offered(question) or _USUAL)}


def offered(question: Mapping[str, Any]) -> list[Option]:
    """The options that the agent itself gives."""
    options = _mapping(question.get("details")).get("options")
    found = [_mapping(option) for option in cast("list[Any]", options)] if isinstance(options, list) else []
    return [
        {"optionId": option["optionId"], "name": option["name"], "kind": option["kind"]}
        for option in found
        if option.get("kind") in _KINDS and all(isinstance(option.get(each), str) for each in ("optionId", "name"))
    ]


def answer(question: Mapping[str, Any], result: Any) -> dict[str, Any] | None:
    """The body of an answer; None: the editor has none to give. It says `cancelled` when it stops the turn, which is
    told on its own and closes the question for everybody; and nobody else's answer is taken away by one who left.

    An answer that was not offered is a denial, with a message that says so: the editor believes that it has answered,
    and the turn would wait for ever."""
    outcome = _mapping(_mapping(result).get("outcome"))
    chosen = outcome.get("optionId")
    if outcome.get("outcome") == "cancelled":
        return None
    own = offered(question)
    option = next((option for option in own or _USUAL if option["optionId"] == chosen), None)
    if option is None or outcome.get("outcome") != "selected":
        said = f"the option {chosen!r:.100}" if isinstance(chosen, str) else "no option"
        return {"decision": "deny", "message": f"denied: the editor chose {said}, which was not offered"}
    if own:
        return {"decision": option["optionId"]}
    if not option["kind"].startswith("allow"):
        return {"decision": "deny"}
    return {"decision": "allow", "remember": True} if option["kind"] == "allow_always" else {"decision": "allow"}


def refused(failure: Failure) -> dict[str, Any]:
    """The body of an answer where the editor gave none, but an error: a denial, with a message that says so."""
    return {
        "decision": "deny",
        "message": f"denied: the editor answered by the error {failure.code} {failure.message!r:.100}",
    }


def _tool_call(question: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent itself said of the call, as far as an editor understands it; each dialect names the call in its
    own way."""
    details = _mapping(question.get("details"))
    call = next((details[name] for name in _CALLS if isinstance(details.get(name), str)), question["question"])
    tool = str(question.get("tool") or question.get("wants") or "permission")
    title = details.get("title") or details.get("display_name")
    return {
        "toolCallId": call,
        "title": title if isinstance(title, str) else tool,
        "status": "pending",
        "rawInput": question.get("input"),
        **({"kind": tool} if tool in _TOOL_KINDS else {}),
        **{name: details[name] for name in ("content", "locations") if isinstance(details.get(name), list)},
    }


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
