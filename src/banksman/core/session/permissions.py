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

from msgspec import Struct

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


# The answer to a question of the agent, before a dialect puts it into the agent's words.


class Decision(Struct, frozen=True, kw_only=True):
    """`allows` False: no. `message`: why, for the agent to read.

    `option`: the one that was chosen, of those that the agent offered; None: any that says the same. `updated_input`:
    what the tool is to be used with instead; None: as it was asked for. An empty one is one: what was emptied on
    purpose must not run as it was asked for. `content`: what the user entered, if that was wanted. `remember`: where
    the agent is to keep this answer for the next time; None: nowhere. `interrupts`: and the turn is to end. `by`: who
    gave it, for the log.
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
        """As the log says it."""
        return "allow" if self.allows else "deny"


DENIED = Decision(allows=False)
