"""Hooks by which a member of a cluster tells other hosts which sessions are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from banksman.core.session.event import Entry
from banksman.core.session.history import SessionHistory

if TYPE_CHECKING:
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec


class ClusterHooks(Protocol):
    """A member of a cluster implements them. All are called in the loop of the host, and none raises."""

    def on_open(self, session: Session) -> None:
        """It is ours from here on."""
        ...

    def on_closed(self, session: Session) -> None:
        """It is not any more: closed, left, or lost."""
        ...

    def on_turn_over(self, session: Session, turn: str) -> None:
        """A turn that somebody asked for has its outcome, and the log has that."""
        ...

    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        """It is claimed, and no process of it is started yet: bring along what it needs here, and say so."""
        ...

    async def wait_heard(self, session: Session) -> None:
        """Until others can ask us for it, as far as that can be known. Cancelled, it only stops waiting."""
        ...
