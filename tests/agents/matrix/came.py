"""Result of one side of a step, for the table and for the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Came:
    """Result of one side of a step.

    `outcome`: a word or two. `tool_left`: the number of processes of an interrupted tool that lived two seconds after
    the interrupt; None if no tool was interrupted. `seen`: further values for the page, by name.
    """

    outcome: str
    tool_left: int | None = None
    seen: dict[str, Any] = field(default_factory=dict[str, Any])
