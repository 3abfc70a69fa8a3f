"""Interface that a cluster member implements: announce sessions, and fetch a session's files.

`registry.py` calls these hooks. `cluster/host/member.py` implements them. The hooks of an agent are
in `hooks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from banksman.core.session.event import Entry
from banksman.core.session.history import SessionHistory

if TYPE_CHECKING:
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec


class ClusterHooks(Protocol):
    """Callbacks of a cluster member, called in the host's event loop.

    No hook raises.
    """

    def on_open(self, session: Session) -> None:
        """This host owns the session from now on."""
        ...

    def on_closed(self, session: Session) -> None:
        """This host has closed, released or lost the session."""
        ...

    def on_turn_over(self, session: Session, turn: str) -> None:
        """The log has the outcome of a turn that a caller asked for."""
        ...

    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        """Fetch the files that a claimed session needs on this host, before its process starts.

        Returns the log entries that record the transfer.
        """
        ...

    async def wait_heard(self, session: Session) -> None:
        """Wait until other hosts can route requests for the session to this host.

        The wait is best effort. Cancelling the call only stops the wait.
        """
        ...
