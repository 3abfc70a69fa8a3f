"""Actions of each caller in a session, from its events: `banksman log --audit`. Pure.

A caller without a name is the holder of the server's own token, the user of the server, or a
program that embeds Banksman.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from banksman.cli.output import as_line

DETAIL_CHARACTERS_MAX = 200


class AuditEntry(NamedTuple):
    """One action. `who`: the caller, or what acted in its place (`rule`, `expiry`); None: unnamed.

    `turn`: the turn that it is about; None: the session as a whole.
    """

    at: float
    cursor: str
    who: str | None
    did: str
    turn: str | None
    detail: str


def audit_of(event: dict[str, Any]) -> AuditEntry | None:
    """Return the action of a caller that an event records; None if it records none."""
    found = _action(event["kind"], event["body"]) if "body" in event else None
    if found is None:
        return None
    who, did, detail = found
    cut = as_line(detail, characters_max=DETAIL_CHARACTERS_MAX)
    return AuditEntry(event["at"], event["cursor"], who, did, event["turn"], cut)


def audit_line(entry: AuditEntry) -> str:
    """Return an action as a line for people."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
    words = (at, as_line(entry.who or "-"), entry.did, as_line(entry.turn or ""), entry.detail)
    return "  ".join(word for word in words if word)


def _action(kind: str, body: dict[str, Any]) -> tuple[str | None, str, str] | None:
    caller: str | None = body.get("caller")
    match kind:
        case "session.opened":
            return caller, "opened", str(body.get("agent", ""))
        case "session.shared":
            return caller, "shared", ", ".join(body["shared"]) or "with no caller"
        case "session.closed":
            return caller, "closed", ""
        case "session.setting" if body["by"] in ("reply", "start", "respawn"):
            return caller, "set", f"{body['name']} {body['value']}"
        case "turn.queued":
            return caller, "asked", _text(body["prompt"])
        case "turn.edited":
            return caller, "edited", "" if body["prompt"] is None else _text(body["prompt"])
        case "queue.changed":
            return caller, "moved", f"before {body['before']}" if body["before"] else "to the head"
        case "hold.granted":
            return caller, "held", body["hold"]
        case "hold.ended":
            by = None if body["by"] == "released" else body["by"]
            return caller or by, "released", body["hold"]
        case "turn.interrupted" if body["cause"] == "interrupt":
            return caller, "interrupted", ""
        case "turn.interrupted" if body["cause"] == "preempt":
            return caller, "preempted", ""
        case "turn.ended" if body["by"] == "withdrawn" and body.get("stopped_by"):
            # Its prompt was not sent, so no `turn.interrupted` precedes this event.
            return body["stopped_by"], "withdrew", ""
        case "question.answered":
            by = body.get("by", "answer")
            answer = f"{body['answer']} {body['question']}"
            message = f": {body['message']}" if body.get("message") else ""
            return caller or (None if by == "answer" else by), "answered", f"{answer}{message}"
        case _:
            return None


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(block.get("text") or f"[{block.get('type')}]") for block in prompt)
