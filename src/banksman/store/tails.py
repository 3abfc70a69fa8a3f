"""Tails: wake the readers of an owned session at each commit, without a future for each event.

A reader that has caught up waits for the next event. The engine that commits the event runs in the
same event loop, so it can call the reader. A tail lives as long as its reader, and its engine calls
it after every group of commits. `Log.wait_past` does the same for one event of any session; it
costs a future and a registration each time.
"""

from __future__ import annotations

from collections.abc import Callable


class SessionTail:
    """A `LogTail` of one session. Its engine changes `seq` and `is_live`.

    `seq`: the last committed seq. `is_live`: False after the session was released or deleted, or
    the log was closed; from then on `seq` does not change. `wake` was called for each change.
    """

    __slots__ = ("_tails", "is_live", "seq", "session", "wake")

    def __init__(self, tails: Tails, session: str, seq: int, wake: Callable[[], None]) -> None:
        self._tails = tails
        # Called by the engine.
        self.wake = wake
        self.session = session
        self.seq = seq
        self.is_live = True

    def close(self) -> None:
        """Stop the notifications."""
        self._tails.remove(self)


class Tails:
    """The open tails of one log. Belongs to its event loop.

    `wake` of a tail must not raise, and must not open or close a tail.
    """

    def __init__(self) -> None:
        # A dict keeps the order: the reader that came first is woken first. None is empty.
        self._sessions: dict[str, dict[SessionTail, None]] = {}
        # The sessions whose readers are to be woken.
        self._moved: dict[str, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def open(self, session: str, seq: int, wake: Callable[[], None]) -> SessionTail:
        """Open a tail of a session whose last committed seq is `seq`."""
        tail = SessionTail(self, session, seq, wake)
        self._sessions.setdefault(session, {})[tail] = None
        return tail

    def remove(self, tail: SessionTail) -> None:
        """Remove a tail. Safe to call twice."""
        tails = self._sessions.get(tail.session)
        if tails is not None and tail in tails:
            del tails[tail]
            if not tails:
                del self._sessions[tail.session]

    def advance(self, session: str, seq: int) -> None:
        """Note a commit of a session. `wake` calls its readers.

        The engine may see the same commit twice.
        """
        tails = self._sessions.get(session)
        if tails is not None:
            self._moved[session] = None
            for tail in tails:
                tail.seq = max(tail.seq, seq)

    def wake(self) -> None:
        """Call the readers of all sessions that have moved: each once for a group of commits."""
        moved, self._moved = self._moved, {}
        for session in moved:
            for tail in self._sessions.get(session, ()):
                tail.wake()

    def end(self, session: str) -> None:
        """End the tails of a session that other hosts may write now, or that was deleted."""
        for tail in self._sessions.pop(session, ()):
            tail.is_live = False
            tail.wake()

    def end_all(self) -> None:
        """End all tails, because the log is closed."""
        for session in list(self._sessions):
            self.end(session)
