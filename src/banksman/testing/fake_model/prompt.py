"""Which script a request plays, and which of its steps. Pure: the decoded body in, the text and a count out.

An agent sends the whole conversation with each call. What the user said last is in it, among things that the user did
not say. This much was seen in the requests of Claude Code 2.1.325:

- Results of tools come in messages of the user's role; reminders of the agent's own stand beside them and beside the
  prompt, each a text block of its own.
- After an interrupt with nothing answered, the old prompt, "[Request interrupted by user]" and the new prompt are three
  blocks of one message. So the last block counts that is the user's, and not the last that has a script.
- A prompt that reaches the agent at work is passed on in a message of the role "system", framed by explanations, after
  the results. Prompts that waited for the end of a turn are joined to one block.
- An answer without the structured output that is due is followed by a message of the user's role that demands it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from banksman.testing.fake_model.script import has_directive

REMINDER = ("<system-reminder>", "</system-reminder>")
# How blocks begin that the agent wrote in the user's name.
AGENTS_WORDS = ("[Request interrupted by user", "[structured-output-enforce]")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user said last, or "" for nothing, and how many model calls have answered it already."""

    text: str
    calls_before: int


class BadRequest(ValueError):
    """A body that no model could answer."""


def has_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools"))


def find(body: dict[str, Any]) -> Prompt:
    """Look from the end for the last thing that the user said. Raises BadRequest."""
    messages: object = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: at least one message is required")
    calls, role_after = 0, ""
    for message in reversed(cast("list[object]", messages)):
        if not isinstance(message, dict):
            raise BadRequest("messages: each must be an object")
        fields = cast("dict[str, object]", message)
        role = fields.get("role")
        if role == "assistant" and role_after != "assistant":
            # Neighbours are one call's answer, cut in pieces.
            calls += 1
        elif role in ("user", "system"):
            text = _said(_blocks(fields.get("content")), is_users=role == "user")
            if text is not None:
                return Prompt(text, calls)
        role_after = str(role)
    return Prompt("", calls)


def _blocks(content: object) -> list[dict[str, object]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest("messages: content must be a string or a list of blocks")
    blocks = cast("list[object]", content)
    if not all(isinstance(block, dict) for block in blocks):
        raise BadRequest("messages: each block must be an object")
    return cast("list[dict[str, object]]", blocks)


def _said(blocks: list[dict[str, object]], *, is_users: bool) -> str | None:
    """What the user said in a message; None if it has only what the agent said and tools gave."""
    has_result = any(block.get("type") == "tool_result" for block in blocks)
    for block in reversed(blocks):
        text = block.get("text")
        if block.get("type") != "text" or not isinstance(text, str):
            continue
        # A script is the user's wherever it stands. Plain words are theirs only where the agent adds none of its own.
        if has_directive(text) or (is_users and not has_result and not _is_agents(text)):
            return text
    return None


def _is_agents(text: str) -> bool:
    begin, end = REMINDER
    words = text.strip()
    return not words or (words.startswith(begin) and words.endswith(end)) or words.startswith(AGENTS_WORDS)
