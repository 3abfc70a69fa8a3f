"""Frames without a meaning: log them without a step of the state machine.

Most frames have no meaning: each token of a text is one. They change only the head and the clocks,
which nobody reads until the next fact. So the driver appends them without a step, and counts them
in before that fact: `plain_entries`, then `count_frames`. `agent_output.py` handles all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.session import event as kinds
from banksman.core.session import watchdogs
from banksman.core.session.event import Entry
from banksman.core.session.state import ProcessPhase, Session, Store
from banksman.core.session.watchdogs import ClockName

# Frames of an agent in these phases need a step.
_NOT_PLAIN = (ProcessPhase.NONE, ProcessPhase.STARTING)


def plain_entries(state: Session, process: int, lines: Sequence[bytes]) -> list[Entry] | None:
    """Return the entries of frames without a meaning; None if the frames change more.

    They do so while the agent starts, while a wait for quiet runs, and while a retry is pending,
    which they end. A process that was replaced is not heard, and a log that fails takes nothing.
    """
    now, speaking = state.process, state.speaking
    if (
        process != now.number
        or now.phase in _NOT_PLAIN
        or state.store is not Store.WORKING
        or (state.turn is not None and state.turn.quiet_until is not None)
        or (speaking is not None and speaking.retry is not None)
    ):
        return None
    return entries(state, lines)


def count_frames(state: Session, frames: int, at: float) -> Session:
    """Count frames that `plain_entries` has accepted. `at`: the time of the last one."""
    clocks = state.clocks
    if clocks:
        clocks = watchdogs.wind(clocks, at, ClockName.BYTES, ClockName.PROGRESS)
    return replace(state, head=state.head + frames, clocks=clocks)


def entries(state: Session, lines: Sequence[bytes], *, recites: bool | None = None) -> list[Entry]:
    """Return the frames as entries of the log, each with the turn that it belongs to."""
    if state.store is not Store.WORKING:
        return []
    protocol = state.process.protocol
    if recites is None:
        recites = protocol is not None and protocol.recites
    kind = kinds.RECITED if recites else kinds.UPDATE
    speaking = state.speaking
    tag = None if speaking is None else speaking.id
    if tag is None or protocol is None or isinstance(protocol, StatelessProtocol):
        return [(tag, kind, line) for line in lines]
    # A frame of another conversation is logged without a turn.
    return [(None if protocol.is_aside(line) else tag, kind, line) for line in lines]
