"""Who waits for an event that is not there yet, and what lets it through.

What this host commits lets its waiters through at once. What another host commits nobody tells us: SQLite has no call
for that, and the file's own notices (inotify) do not come for what is written by way of shared memory. So the number
that changes with every commit is looked at every `WATCH_SECONDS`. It is the one thing in this project that polls. It is
three microseconds of the loop, it is done only while somebody waits for what another host may write, and it is as late
as a person does not notice. Who waits on a session that is owned here does not need it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeAlias

from banksman.errors import StoreError
from banksman.store.sqlite.lookup import Lookup
from banksman.store.sqlite.ownership import Held

WATCH_SECONDS = 0.05

log = logging.getLogger("banksman")

# Its result is the error to raise, so that none is lost with a future whose task was cancelled meanwhile.
_Waiter: TypeAlias = "asyncio.Future[StoreError | None]"
# Of one session: past which seq each waits, and which identity the session had when the wait began.
_Waiters: TypeAlias = "dict[_Waiter, tuple[int, int | None]]"
_NOBODY: Mapping[_Waiter, tuple[int, int | None]] = {}


class TailWaiters:
    """All that wait on one log. `owned`: the sessions that only we write, kept up to date by who gives it."""

    def __init__(self, look: Lookup, owned: Mapping[str, Held]) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = look
        self._owned = owned
        # By session, and not in it: one may wait for a session that nobody has claimed yet.
        self._sessions: dict[str, _Waiters] = {}
        self._positions: dict[_Waiter, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Of the last look: the number that changes, the newest chunk, and how many sessions were deleted.
        self._seen = (0, 0, 0)

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._sessions.values()) + len(self._positions)

    async def wait_past(self, session: str, seq: int, *, is_known: bool) -> None:
        head, number = self._place(session)
        if head <= seq and session not in self._owned and self._watch():
            # The watch has begun just now, with what is there now. What was committed before it and after the look
            # above is seen by another look only.
            head, number = self._place(session)
        if is_known and number is None:
            # By another thread, since the caller looked. Nobody would tell this waiter: it waits for no session.
            raise StoreError("the session was deleted", session=session)
        if head > seq:
            return
        # From here to the future's place among the waiters nothing else can run in this thread.
        waiters = self._sessions.setdefault(session, {})
        future: _Waiter = self._loop.create_future()
        waiters[future] = (seq, number)
        try:
            error = await future
        finally:
            waiters.pop(future, None)
            # Another set may be in its place by now, if this one was emptied.
            if not waiters and self._sessions.get(session) is waiters:
                del self._sessions[session]
        if error is not None:
            raise error

    async def wait_past_chunk(self, chunk: int) -> None:
        self._watch()
        if self._look.newest_chunk() > chunk:
            return
        future: _Waiter = self._loop.create_future()
        self._positions[future] = chunk
        try:
            error = await future
        finally:
            self._positions.pop(future, None)
        if error is not None:
            raise error

    def _place(self, session: str) -> tuple[int, int | None]:
        """The session's head, and its identity. What is ours is known here: its next commit comes by this loop."""
        held = self._owned.get(session)
        if held is not None:
            return held.seq, held.number
        place = self._look.place(session)
        return place.head.seq, place.number

    # -- what lets them through --------------------------------------------------------------------------------------
    def on_committed(self, session: str, seq: int) -> None:
        for future, (past, _) in self._sessions.get(session, _NOBODY).items():
            if past < seq and not future.done():
                future.set_result(None)

    def on_placed(self, session: str, seq: int, number: int | None) -> None:
        """This is where the session is, and which one it is. Others may have brought it there while nobody looked."""
        self._tell_former(session, number)
        self.on_committed(session, seq)

    def on_group(self) -> None:
        """Something was committed here."""
        if self._positions:
            try:
                self._on_newest(self._look.newest_chunk())
            except StoreError as exc:
                log.warning("! the store could not be looked at: %s", exc)  # The watch looks again.

    def on_released(self, session: str) -> None:
        """What was ours alone may now be written by others. They may have done so already, if it was taken from us."""
        if session not in self._sessions:
            return
        try:
            # The watch first: what it begins with is what was there before the look.
            self._watch()
            place = self._look.place(session)
        except StoreError as exc:
            # It is no affair of who releases. All that there is counts as new, and is looked at in time.
            log.warning("! the store could not be looked at: %s", exc)
            self._seen = (-1, 0, 0)
            if self._timer is None:
                self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        else:
            self.on_placed(session, place.head.seq, place.number)

    def on_deleted(self, session: str, number: int) -> None:
        """Whoever waits on the session of that number is told: the event it waits for would be another history's."""
        for future, (_, known) in self._sessions.get(session, _NOBODY).items():
            if known == number and not future.done():
                future.set_result(StoreError("the session was deleted", session=session))

    def close(self, error: StoreError) -> None:
        """Everybody is told."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        futures = [future for waiters in self._sessions.values() for future in waiters]
        for future in [*futures, *self._positions]:
            if not future.done():
                future.set_result(error)

    # -- what other hosts commit -------------------------------------------------------------------------------------
    def _watch(self) -> bool:
        """Begin to look, if nobody does yet: whether it has begun now."""
        if self._timer is not None:
            return False
        # The number before the rest: what comes in between is looked at once more than needed.
        self._seen = (self._look.version(), self._look.newest_chunk(), self._look.deletions())
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        return True

    def _on_time(self) -> None:
        self._timer = None
        if not self._positions and all(session in self._owned for session in self._sessions):
            return
        try:
            self._look_around()
        except StoreError as exc:
            # It is tried again; who reads meanwhile is told by its own call.
            log.warning("! the store could not be looked at: %s", exc)
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)

    def _look_around(self) -> None:
        version, newest, deletions = self._seen
        found = self._look.version()
        if found == version:
            return
        # In this order: what is committed between two of these looks is behind the number, and is seen next time.
        seen = (found, self._look.newest_chunk(), self._look.deletions())
        # Before the rest: whoever waits on a session that was deleted must not be let through by one of the same id.
        if seen[2] != deletions:
            self._check_deleted()
        for session, seq in self._look.heads_after(newest) if self._sessions else ():
            self.on_committed(session, seq)
        self._on_newest(seen[1])
        # Only now: if one of these looks failed, all are done again.
        self._seen = seen

    def _on_newest(self, chunk: int) -> None:
        for future, past in self._positions.items():
            if past < chunk and not future.done():
                future.set_result(None)

    def _check_deleted(self) -> None:
        for session in self._sessions:
            self._tell_former(session, self._look.place(session).number)

    def _tell_former(self, session: str, number: int | None) -> None:
        """Those who wait on a session of this id that was another than the one of that number."""
        for _, known in list(self._sessions.get(session, _NOBODY).values()):
            if known is not None and known != number:
                self.on_deleted(session, known)
