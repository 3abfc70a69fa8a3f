"""Which tools the agent may use without a question, and which it may not use at all: rules by the tool's name.

A rule names a tool, or the beginning of its name with a `*` behind it (`mcp__github__*`). Rules come in layers, the
narrowest first: those of one ask, then those of the session. Within a layer the first that fits counts. Where none
fits, the agent's own settings decide, as if there were no rules.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from banksman.errors import UsageError


class Verdict(enum.StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    # Somebody is to be asked, also where the agent would not.
    ASK = "ask"


Rules = tuple[tuple[str, Verdict], ...]

# Each tool call looks at all of them.
RULES_MAX = 256
# What a tool can be called. Anything else could fit none, and whoever wrote it would believe that it holds.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+\*?|\*")


def parse(wanted: Any) -> Rules:
    """The rules that a caller gave as a mapping from names to words."""
    if wanted is None:
        return ()
    hint = 'a mapping from names of tools (a * at the end: all that begin so) to "allow", "deny" or "ask"'
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
        raise UsageError(f"there are {len(rules)} rules", hint=f"at most {RULES_MAX}; a * stands for many")
    return tuple(rules)


def verdict(tool: str, layers: Iterable[Rules]) -> Verdict | None:
    for rules in layers:
        for name, found in rules:
            if tool == name or (name.endswith("*") and tool.startswith(name[:-1])):
                return found
    return None
