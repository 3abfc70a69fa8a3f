"""Events in words: one line each, for whoever reads a log, and nothing for those that say nothing to a person."""

from __future__ import annotations

import json
import time
from typing import Any

from banksman.cli.terminal import as_line

Event = dict[str, Any]

# A line is to be read. Whoever wants all of it takes --json, or --raw.
SUMMARY_CHARACTERS_MAX = 500
# Of our own kinds, what is not worth a line's room.
_LONG = ("born", "ref", "usage", "details", "command", "args", "env", "options", "rules", "system_prompt", "schema")


def line_of(event: Event) -> str | None:
    """None: a frame that only the dialect cares for."""
    kind = event["kind"]
    if kind == "stream.gap":
        return f"{'':>8}  {'':8}  events {event['first']} to {event['last']} are no longer kept"
    said = " | ".join(summary for update in _updates(event) if (summary := _update(update)))
    if kind in ("update", "sent"):
        if not said:
            return None
    else:
        said = _own(event["body"])
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    place = f"{as_line(event['cursor']):>8}  {at}  {as_line(kind)}"
    turn = f" {as_line(event['turn'])}" if event["turn"] else ""
    return f"{place}{turn}  {as_line(said, characters_max=SUMMARY_CHARACTERS_MAX)}".rstrip()


def text_of(event: Event) -> str:
    """What the agent says to the user in it."""
    chunks = (update for update in _updates(event) if update.get("sessionUpdate") == "agent_message_chunk")
    return "".join(_content(update) for update in chunks)


def tools_of(event: Event) -> list[str]:
    """The tools that it calls."""
    return [str(update.get("title")) for update in _updates(event) if update.get("sessionUpdate") == "tool_call"]


def question_of(event: Event) -> str:
    """What is asked, in a `question.asked`."""
    body = event["body"]
    return f"{body.get('tool') or body.get('wants')} {json.dumps(body.get('input'), ensure_ascii=False)}"


def _updates(event: Event) -> list[Event]:
    return event["body"].get("updates", []) if event["kind"] == "update" else []


def _content(update: Event) -> str:
    content = update.get("content")
    # Of ACP's kinds of content only one is words.
    return str(content.get("text", "")) if isinstance(content, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _update(update: Event) -> str:
    match update.get("sessionUpdate"):
        case "agent_message_chunk":
            return f"says {_content(update)}"
        case "agent_thought_chunk":
            return f"thinks {_content(update)}"
        case "tool_call":
            return f"calls {update.get('title')}"
        case "tool_call_update":
            return f"tool {update.get('status')}"
        case "usage_update":
            return ""
        case kind:
            return str(kind)


def _own(body: Event) -> str:
    shown = {name: value for name, value in body.items() if name not in _LONG and value not in (None, [], {}, "")}
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in shown.items()
    )
