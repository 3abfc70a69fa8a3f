"""The answer to a question of the agent, before a dialect puts it into the agent's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


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
