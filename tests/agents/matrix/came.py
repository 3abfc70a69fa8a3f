"""What came of one side of a step, for the table and for the page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Came:
    """`outcome`: a word or two. `tool_left`: how many processes of an interrupted tool lived two seconds after the
    interrupt; None: none was interrupted. `seen`: what else the page tells, by name."""

    outcome: str
    tool_left: int | None = None
    seen: dict[str, Any] = field(default_factory=dict[str, Any])
