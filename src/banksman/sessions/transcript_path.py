"""Where an agent keeps what was said in a conversation: the one file that it needs to go on with it, by its profile.

A profile names the place by a pattern, such as `~/.house/{cwd_slug}/{conversation}.jsonl`. It begins with the home of
the agent or with a folder that a variable of its environment names, so that what is found by it is always below one of
these. The name of a conversation is what the agent, or a log, says: it is one word here, or there is no place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

HINT = "~/… or $VARIABLE/…, with {conversation} and, if need be, {cwd_slug} in it, and without .."
# A folder's name of more characters is cut by Claude, with a hash of its own behind it, which nobody else can make.
SLUG_CHARACTERS_MAX = 200

_PATTERN = re.compile(r"(?:~|\$(?P<variable>[A-Z][A-Z0-9_]*))/(?P<rest>[^{}]*(?:\{(?:cwd_slug|conversation)\}[^{}]*)+)")
_CONVERSATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_NO_WORD = re.compile(r"[^A-Za-z0-9]")


def is_pattern(text: str) -> bool:
    found = _PATTERN.fullmatch(text)
    return found is not None and "{conversation}" in text and ".." not in text and "\0" not in text


def place(patterns: Sequence[str], *, cwd: str, conversation: str, env: Mapping[bytes, bytes]) -> Path | None:
    """Of the patterns, the first whose variable is set says it. None: nobody knows. Looks at the file system, for the
    agent knows its folder by its real name."""
    if not _CONVERSATION.fullmatch(conversation):
        return None
    for pattern in patterns:
        found = _PATTERN.fullmatch(pattern)
        assert found is not None, "it was checked when the profile was read"
        below = env.get(os.fsencode(found["variable"] or "HOME"))
        if not below:
            continue
        slug = _NO_WORD.sub("-", os.path.realpath(cwd))
        if not os.path.isabs(below) or ("{cwd_slug}" in pattern and len(slug) > SLUG_CHARACTERS_MAX):
            return None
        rest = found["rest"].replace("{cwd_slug}", slug).replace("{conversation}", conversation)
        return Path(os.fsdecode(below), rest)
    return None
