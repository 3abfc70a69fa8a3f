"""Permission rules by tool name: allow, deny or ask. `questions.py` applies them.

A rule names a tool, or a prefix of its name followed by `*` (`mcp__github__*`). Rules come in
layers, the narrowest first: the rules of the ask, then those of the session. Within a layer the
first matching rule counts. If no rule matches, the agent's own settings decide, as if there were no
rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from banksman.core.dialects.dialect import Verdict
from banksman.errors import UsageError

Rules = tuple[tuple[str, Verdict], ...]

# Every tool call checks all of them.
RULES_MAX = 256
# Valid tool names. A rule for any other name could never match, and its author would trust it.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+\*?|\*")


def parse(wanted: Any) -> Rules:
    """Parse a caller's mapping from tool names to verdicts."""
    if wanted is None:
        return ()
    hint = 'use a mapping from tool names (a final * matches any end) to "allow", "deny" or "ask"'
    if not isinstance(wanted, Mapping):
        raise UsageError(f"rules cannot be {wanted!r:.60}", hint=hint)
    rules: list[tuple[str, Verdict]] = []
    for name, word in cast(Mapping[Any, Any], wanted).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"a rule cannot be for {name!r:.60}", hint=hint)
        if not isinstance(word, str) or word not in tuple(Verdict):
            raise UsageError(f"a rule for {name} cannot be {word!r:.60}", hint=hint)
        rules.append((name, Verdict(word)))
    if len(rules) > RULES_MAX:
        hint = f"use at most {RULES_MAX}; a * stands for many"
        raise UsageError(f"too many rules: {len(rules)}", hint=hint)
    return tuple(rules)


def verdict(tool: str, layers: Iterable[Rules]) -> Verdict | None:
    """Return the verdict of the first matching rule; None if no rule matches."""
    for rules in layers:
        for name, found in rules:
            if tool == name or (name.endswith("*") and tool.startswith(name[:-1])):
                return found
    return None
