"""Permission rules by tool name (allow, deny or ask), and `Decision`, an answer to a question.

`questions.py` applies the rules. A `Decision` is the answer of a caller, a callback or a rule,
before a dialect encodes it.

A rule names a tool, or a prefix of its name followed by `*` (`mcp__github__*`). Rules come in
layers, the narrowest first: the rules of the ask, then those of the session. Within a layer the
first matching rule counts. If no rule matches, the agent's own settings decide, as if there were no
rules.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from msgspec import Struct

from banksman.errors import UsageError


class Verdict(enum.StrEnum):
    """Result of a rule."""

    ALLOW = "allow"
    DENY = "deny"
    # Ask a human, even where the agent would not.
    ASK = "ask"


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


# The answer to a question of the agent, before a dialect encodes it.


class Decision(Struct, frozen=True, kw_only=True):
    """A caller's answer to a question.

    - `allows`: True for yes, False for no. `message`: the reason, for the agent to read.
    - `option`: the chosen one of the options that the agent offered; None: any option with the same
      meaning.
    - `updated_input`: the input that the tool gets instead; None: unchanged. An empty mapping
      counts: an input that was emptied on purpose must not run unchanged.
    - `content`: the user's input, if the agent wanted some.
    - `remember`: where the agent stores this answer for the next time; None: nowhere.
    - `interrupts`: the turn is to end as well.
    - `by`: the source of the answer, for the log.
    """

    allows: bool
    message: str | None = None
    option: str | None = None
    updated_input: Mapping[str, Any] | None = None
    content: Mapping[str, Any] | None = None
    remember: str | None = None
    interrupts: bool = False
    by: str = "answer"

    @property
    def word(self) -> str:
        """The answer as the log spells it."""
        return "allow" if self.allows else "deny"


DENIED = Decision(allows=False)
