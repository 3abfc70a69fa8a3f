"""Which script a request plays, and which of its steps. Pure: a conversation in, the text and a count out.

An agent sends the whole conversation with each call. What the user said last is in it, among things that the user did
not say: results of tools, reminders, where the agent works, that a turn was interrupted. Those are told by where they
stand (see each API) and by how they are framed. Of several texts in one message the last one counts that is the user's,
and not the last that has a script: after an interrupt the old prompt may stand before the new one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from banksman.testing.fake_model.apis.api import Entry, Who
from banksman.testing.fake_model.script import has_directive

# A text that is framed by one tag, as in "<system-reminder>…</system-reminder>" and "<environment_context>…".
FRAMED = re.compile(r"\s*<([a-z_-]+)>.*</\1>\s*", re.DOTALL)
# How texts begin that the agent wrote in the user's name.
AGENTS_WORDS = ("[Request interrupted by user", "[structured-output-enforce]", "# AGENTS.md instructions")


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """What the user said last, or "" for nothing, and how many model calls have answered it already."""

    text: str
    calls_before: int


def find(entries: Sequence[Entry]) -> ModelPrompt:
    """Look from the end for the last thing that the user said."""
    calls, who_after = 0, None
    for entry in reversed(entries):
        if entry.who is Who.MODEL:
            # Neighbours are one call's answer, cut in pieces.
            calls += who_after is not Who.MODEL
        else:
            text = _said(entry)
            if text is not None:
                return ModelPrompt(text, calls)
        who_after = entry.who
    return ModelPrompt("", calls)


def _said(entry: Entry) -> str | None:
    """What the user said in a message; None if it has only what the agent said and tools gave."""
    for text in reversed(entry.texts):
        # A script is the user's wherever it stands. Plain words are theirs only where the agent adds none of its own.
        if has_directive(text) or (entry.who is Who.USER and not entry.has_result and not _is_agents(text)):
            return text
    return None


def _is_agents(text: str) -> bool:
    words = text.strip()
    return not words or words.startswith(AGENTS_WORDS) or FRAMED.fullmatch(text) is not None
