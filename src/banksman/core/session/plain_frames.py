"""Frames without a meaning: log them without a step of the state machine.

Most frames have no meaning: each token of a text is one. They change only the head and the clocks,
which nobody reads until the next fact. So the driver appends them without a step, and counts them
in before that fact: `label_of`, then `count_frames`. `agent_output.py` handles all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.session import event as kinds
from banksman.core.session import watchdogs
from banksman.core.session.event import Entry
from banksman.core.session.state import ProcessPhase, Session, Store
from banksman.core.session.watchdogs import ClockName

# Frames of an agent in these phases need a step.
_NOT_PLAIN = (ProcessPhase.NONE, ProcessPhase.STARTING)


class FrameLabel(Struct, frozen=True):
    """Common part of the frames of a process in the log, as long as the state is the same.

    `tag`: the turn that they belong to. `is_aside`: whether a frame is of another conversation, and
    logged without a turn; None if the dialect has no such frames.
    """

    process: int
    tag: str | None
    kind: str
    is_aside: Callable[[bytes], bool] | None

    def entries(self, lines: Sequence[bytes]) -> list[Entry]:
        """Return the frames as entries of the log."""
        tag, kind, is_aside = self.tag, self.kind, self.is_aside
        if tag is None or is_aside is None:
            return [*zip(repeat(tag), repeat(kind), lines)]
        return [(None if is_aside(line) else tag, kind, line) for line in lines]


def label_of(state: Session) -> FrameLabel | None:
    """Return the label of frames without a meaning; None if the frames change more.

    They do so while the agent starts, while a wait for quiet runs, and while a retry is pending,
    which they end. A log that fails takes nothing.
    """
    speaking = state.speaking
    if (
        state.process.phase in _NOT_PLAIN
        or state.store is not Store.WORKING
        or (state.turn is not None and state.turn.quiet_until is not None)
        or (speaking is not None and speaking.retry is not None)
    ):
        return None
    return _label(state, None)


def count_frames(state: Session, frames: int, at: float) -> Session:
    """Count frames that had a label. `at`: the time of the last one."""
    clocks = state.clocks
    if clocks:
        clocks = watchdogs.wind(clocks, at, ClockName.BYTES, ClockName.PROGRESS)
    return replace(state, head=state.head + frames, clocks=clocks)


def entries(state: Session, lines: Sequence[bytes], *, recites: bool | None = None) -> list[Entry]:
    """Return the frames as entries of the log, each with the turn that it belongs to."""
    if state.store is not Store.WORKING:
        return []
    return _label(state, recites).entries(lines)


def _label(state: Session, recites: bool | None) -> FrameLabel:
    protocol, speaking = state.process.protocol, state.speaking
    if recites is None:
        recites = protocol is not None and protocol.recites
    is_aside = None
    if protocol is not None and not isinstance(protocol, StatelessProtocol):
        is_aside = protocol.is_aside
    return FrameLabel(
        state.process.number,
        None if speaking is None else speaking.id,
        kinds.RECITED if recites else kinds.UPDATE,
        is_aside,
    )
