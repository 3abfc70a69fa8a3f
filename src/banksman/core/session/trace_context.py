"""W3C trace context of an ask: the `traceparent` that came with it, and the one for its agent.

A turn is a span of its ask's trace. The id of the span is the random part of the turn's id. So the
host that sends the prompt and the host that reports the span need no agreement but the log.

A parent of zeros is no valid span. Here it stands for a trace that begins with this turn.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NO_PARENT = "0" * 16
_TEXT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TURN = re.compile(r"t-([0-9a-f]{16})")


class TraceContext(NamedTuple):
    """The members of a `traceparent`. `flags`: 01 if the trace is recorded."""

    trace: str
    parent: str
    flags: str = "01"

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.flags, 16) & 1)

    @property
    def text(self) -> str:
        return f"00-{self.trace}-{self.parent}-{self.flags}"


def parse(text: str) -> TraceContext | None:
    """Return the members of a `traceparent`; None if it is invalid."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace, parent, flags, rest = match.groups()
    # A later version may have more members. Version ff is invalid.
    if version == "ff" or (version == "00" and rest is not None) or not trace.strip("0"):
        return None
    return TraceContext(trace, parent, flags)


def span_of(turn: str) -> str | None:
    """Return the id of a turn's span; None if the turn was not made by an ask of this version."""
    match = _TURN.fullmatch(turn)
    return None if match is None or match[1] == NO_PARENT else match[1]


def of_agent(trace: str | None, turn: str) -> str | None:
    """Return the `traceparent` for the agent that works on this turn; None without a trace."""
    context = None if trace is None else parse(trace)
    span = span_of(turn)
    if context is None or span is None:
        return None
    return context._replace(parent=span).text
