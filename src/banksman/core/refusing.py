"""What whoever wants something new is told in a session that takes nothing new: whether to go elsewhere, or to wait."""

from __future__ import annotations

from banksman.core.state import KEEPING, OVER, Session
from banksman.errors import Closed, Moving, Refused


def not_open(state: Session, **ids: object) -> Refused:
    """Nothing of what was asked for is begun."""
    is_over = state.mode in OVER
    if state.mode in KEEPING:
        where = "has left this host" if is_over else "is leaving this host"
        return Moving(f"the session {where}, and this was not accepted", hint="ask again in a moment", **ids)
    where = "is closed" if is_over else "is being closed and takes nothing new"
    return Closed(f"the session {where}", hint="open another", **ids)
