"""In words: events, one line each and nothing for those that say nothing to a person; questions; and hints."""

from __future__ import annotations

import json
import re
import shlex
import time
from typing import Any, cast

from banksman.cli.output.terminal import as_line

Event = dict[str, Any]

# A line is to be read. Whoever wants all of it takes --json, or --raw.
SUMMARY_CHARACTERS_MAX = 500
# Of our own kinds, what is not worth a line's room.
_LONG = ("born", "ref", "usage", "details", "command", "args", "env", "options", "rules", "system_prompt", "schema")
_ON_BUSY = re.compile(r'on_busy="(\w+)"')
# `sessions()` and `after=None`; but not `(ulimit -n)`, `--flag=value` or `VARIABLE=value`, which a shell understands.
_PYTHON = re.compile(r"\w\(|(?<![-\w])[a-z_]+=|\ban int\b")
# What whoever speaks HTTP would do next, and the verb for it. The longer path first.
_VERBS = {"/v1/hosts": "banksman hosts", "/v1/sessions": "banksman ps", "/v1/commands": "banksman ps --all"}
_PATH = re.compile("|".join(map(re.escape, _VERBS)))
_OF_HTTP = re.compile(r",? with the same Idempotency-Key| \((?:GET|POST|PATCH|PUT|DELETE)\)")
_HTTP = re.compile(
    r"/v\d+/|/openapi\.json|\b(?:GET|POST|PATCH|PUT|DELETE|HEAD)\b|[A-Z][a-z]+-(?:Key|Type|Length|After)\b"
)
_STEPS = (
    ("sessions()", "see banksman ps"),
    ("commands()", "see banksman ps --all"),
    ("an int", "interactive, normal, background, or a number"),
    ("after=None", "begin again without --after"),
)


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


def prompt_of(prompt: Any) -> str:
    """What was asked, in words: a prompt is text, or blocks of which some are."""
    if isinstance(prompt, str):
        return prompt
    blocks = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    return " ".join(_block(cast("dict[str, Any]", each)) for each in blocks if isinstance(each, dict))


def _block(block: dict[str, Any]) -> str:
    return str(block["text"]) if isinstance(block.get("text"), str) else f"[{block.get('type')}]"


def tokens_of(usage: Any) -> str:
    """What was read and written; empty: the agent does not say."""
    if not isinstance(usage, dict):
        return ""
    used = cast("dict[str, Any]", usage)
    # One agent counts what it had in its cache beside the rest, the others within it.
    beside = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = [count for name in (*beside, "inputTokens") if isinstance(count := used.get(name), int)]
    written = [count for name in ("output_tokens", "outputTokens") if isinstance(count := used.get(name), int)]
    return f"{sum(read)} tokens in, {sum(written)} out" if read and written else ""


def how_to_answer(session: str, question: str) -> str:
    """The command, to be copied: whatever the session is called, a shell takes it for one word."""
    return f"banksman answer {shlex.quote(session)} {shlex.quote(question)} allow|deny"


def hint_of(said: str) -> str:
    """A hint of the server's for whoever sits at a shell. It was written for whoever calls Python or speaks HTTP: where
    it names a call, an argument or a path, our own next step is said instead, or nothing, if there is none that helps
    for sure."""
    hint = _ON_BUSY.sub(r"--on-busy \1", said)
    hint = _PATH.sub(lambda found: _VERBS[found[0]], _OF_HTTP.sub("", hint))
    if not _PYTHON.search(hint):
        return "" if _HTTP.search(hint) else hint
    return next((step for named, step in _STEPS if named in hint), "")


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
