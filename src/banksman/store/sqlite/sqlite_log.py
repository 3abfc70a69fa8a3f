"""`Log` engine on one SQLite file: the part that runs in the event loop.

The engine implements the protocol of `store/log.py` at one of two durability levels:

- `full`: an acknowledged change is on the disk.
- `normal`: an acknowledged change is in the kernel's page cache. It survives the death of any
  process. A power cut may remove the newest appends, whole appends from the end of the log. It
  never removes an epoch (`ownership.py`).

Two threads do the work that may block: one writes (`writer_thread.py`), and one reads histories
(`worker_threads.py`). `worker_threads.py` also connects both threads with the event loop. The
loop's own thread runs short lookups that cannot block on another process (`tail_wait.py`). At the
level `normal` it also commits small groups (`group_writer.py`).

Several hosts may have the file open. Locks show which hosts are alive (`host_locks.py`), and the
session's row names its owner. Every change of a session happens under the store's write lock, as a
compare-and-set: the caller names the values that it believes to be stored.

After `close` every call raises `StoreError` or completes with it, except `release`: the close has
released everything.

A forked child has no threads and no locks, so it must open the store again. The inherited objects
do nothing there, and do not hang.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import NotOwner, StoreError, UsageError
from banksman.histogram import Histogram
from banksman.store.log import LogPhase, LogTail, OwnershipListener
from banksman.store.log_values import (
    READ_EVENTS_MAX,
    Chunk,
    Done,
    Head,
    KnownSession,
    MultiSessionPage,
    Owner,
    Page,
    Position,
    ProjectOf,
    Snapshot,
    TurnPlace,
    UsageBy,
    UsageRow,
)
from banksman.store.memory_session import TurnIndexes
from banksman.store.preconditions import check_after, check_seq, check_text, checked_limit
from banksman.store.sqlite import (
    deleted_sessions,
    maintenance,
    open_file,
    ownership,
    pages,
    turn_table,
    usage_table,
)
from banksman.store.sqlite.append import AppendOperation
from banksman.store.sqlite.maintenance import Deleted, SqliteRetention
from banksman.store.sqlite.operations import OwnerChange, WriterOperation
from banksman.store.sqlite.owned_sessions import OwnedSessions
from banksman.store.sqlite.ownership import ClaimedSession, ReleaseOperation
from banksman.store.sqlite.spool import RunningSpools
from banksman.store.sqlite.worker_threads import StoreThreads, complete
from banksman.store.usage_sums import SessionUsageReader, UsageTable, checked_query, merged

LEVELS = ("full", "normal")
# Larger than every seq. SQLite integers have 64 bits.
_SEQ_MAX = 1 << 62

log = logging.getLogger("banksman")


class SqliteLog:
    """A `Log` in the file at `path`, which is created if missing.

    The object belongs to the event loop in which it was opened.

    `bytes_max`, `seconds_max`: approximate retention limits of each session. Events that the last
    snapshot does not cover are kept in addition. `address`: where clients can reach this host; it
    appears in the error that other hosts get for its sessions.
    """

    is_durable: bool = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        level: str = "normal",
        address: str = "",
        bytes_max: int | None = None,
        seconds_max: float | None = None,
    ) -> None:
        if level not in LEVELS:
            hint = f"pass one of: {', '.join(LEVELS)}"
            raise UsageError(f"level cannot be {level!r:.60}", hint=hint, level=level)
        retention = SqliteRetention(bytes_max, seconds_max)
        self._loop = asyncio.get_running_loop()
        self.path = open_file.checked_path(path)
        self._phase = LogPhase.OPEN
        # Number of the last failure that a writer has received. See `operations.py`.
        self._told = 0
        self._spools = RunningSpools(self.path)
        # Completions of calls made after the close began. They run after all earlier completions.
        self._late: list[Callable[[], None]] = []
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._bridge = StoreThreads(
            self.path,
            self,
            level=level,
            address=address or socket.gethostname(),
            retention=retention,
        )
        self._look = self._bridge.look
        self._owned = OwnedSessions(self._look)
        self._waiting = self._owned.waiting
        # In memory, for a read-only file whose tables of turns and of usage cannot be completed.
        self._turns = TurnIndexes(self.read)
        self._usage = SessionUsageReader(self.read)

    def __repr__(self) -> str:
        return (
            f"<SqliteLog {self.path!r} {self._phase.name} "
            f"owned={len(self._owned)} waiting={len(self._waiting)}>"
        )

    @property
    def identity(self) -> str:
        """The identity of the file: a copy has its sessions, and another identity."""
        return open_file.identity(self.path)

    # -- owning -----------------------------------------------------------------------------------
    async def claim(
        self, session: str, *, name: str | None = None, agent: str | None = None
    ) -> int:
        """Claim a session, see `Log.claim`.

        A cancelled claim has no effect: the session is released if it was claimed.
        """
        self._check_open()
        check_text(session, name, agent)
        function = partial(ownership.claim, session=session, name=name, agent=agent)
        held = await self._bridge.call(
            function, then=partial(self._on_claimed, session), is_synced=True, needs_host=True
        )
        return held.epoch

    def _on_claimed(self, session: str, held: ClaimedSession, is_wanted: bool) -> None:
        self._owned.add(session, held)
        if not is_wanted:
            self.release(session, held.epoch)

    def advance(self, session: str, epoch: int, done: Done) -> None:
        if self._is_late(session, done):
            return
        function = partial(ownership.advance, session=session, epoch=epoch)
        self._bridge.put(
            OwnerChange(self._on_told, session, epoch, self._told, done, function, is_synced=True)
        )

    def release(self, session: str, epoch: int) -> None:
        if self._phase is not LogPhase.OPEN:
            return
        self._owned.drop(session, epoch)
        self._bridge.put(ReleaseOperation(session, epoch))

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        check_text(name)
        if self._is_late(session, done):
            return
        function = partial(ownership.lease, session=session, epoch=epoch, name=name)
        self._bridge.put(
            OwnerChange(
                self._on_told, session, epoch, self._told, done, function, is_of_owner=False
            )
        )

    # -- writing ----------------------------------------------------------------------------------
    def append(  # noqa: PLR0917  The protocol's signature, called once per chunk: keyword arguments would cost time.
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        if self._phase is not LogPhase.OPEN and self._is_late(session, done):
            return
        self._bridge.put(
            AppendOperation(
                self._on_appended,
                session,
                epoch,
                self._told,
                done,
                expected_seq,
                at,
                entries,
                snapshot,
            )
        )

    async def restore(
        self,
        session: str,
        *,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None = None,
    ) -> None:
        """Restore a session, see `Log.restore`.

        A cancellation while the chunks are read has no effect on the store, and the reading thread
        ends with the next chunk. After a later cancellation the restore may still complete.
        """
        self._check_open()
        check_text(session, name, agent)

        def restored(*_: object) -> None:
            self._waiting.on_committed(session, self._look.place(session).head.seq)

        async with self._spools.filled(session, chunks) as (spool, history):
            self._check_open()
            function = partial(
                maintenance.restore,
                session=session,
                name=name,
                agent=agent,
                history=history,
                snapshot=snapshot,
            )
            await self._bridge.call(function, then=restored, is_alone=True, around=spool.attached)

    # -- reading ----------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        self._check_open()
        return self._look.place(session).head

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        check_after(session, after)
        limit = checked_limit(limit)
        self._check_open()
        events = self._owned.recent(session, after, limit, project, is_live=False)
        if events is not None:
            # A reader far behind reads page after page. Without this pause it would block the event
            # loop for all other tasks.
            await asyncio.sleep(0)
            return Page(events, None)
        after = min(after, _SEQ_MAX)
        return await self._bridge.ask(
            partial(pages.read, session=session, after=after, limit=limit, project=project)
        )

    def recent(
        self, session: str, after: int, limit: int, project: Project | None = None
    ) -> list[Event] | None:
        if self._phase is not LogPhase.OPEN:
            return None
        return self._owned.recent(session, after, limit, project, is_live=True)

    def tail(self, session: str, wake: Callable[[], None]) -> LogTail | None:
        return self._owned.tail(session, wake)

    async def find_turn(self, session: str, turn: str) -> TurnPlace | None:
        """Find a turn, see `Log.find_turn`.

        A history that was restored, or that an older version wrote, is read once to index it. In a
        read-only file each handle has to do this.
        """
        self._check_open()
        check_text(turn)
        if not self._bridge.is_writable:
            place = self._look.place(session)
            if place.number is None:
                return None
            return await self._turns.find(
                session, turn, identity=place.number, first=place.head.first
            )
        while True:
            found = await self._bridge.ask(partial(turn_table.find, session=session, turn=turn))
            if found.is_complete:
                return found.place
            self._check_open()
            await self._bridge.call(partial(turn_table.complete_some, session=session))

    async def snapshot(self, session: str) -> Snapshot | None:
        self._check_open()
        return await self._bridge.ask(partial(pages.snapshot, session=session))

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        check_seq(session, seq)
        self._check_open()
        await self._waiting.wait_past(session, seq, is_known=is_known)

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        limit = checked_limit(limit)
        position = None if after is None else Position.of(after)
        self._check_open()
        wanted = None if sessions is None else frozenset(sessions)
        found = await self._bridge.ask(
            partial(pages.read_many, after=position, limit=limit, sessions=wanted)
        )
        # Done here and not in the reader thread: `project_of` belongs to the event loop.
        placed = pages.positioned(found.pieces, limit, project_of)
        return MultiSessionPage(placed or (), found.end.text, found.gaps)

    async def wait_past_position(self, position: str) -> None:
        place = Position.of(position)
        self._check_open()
        place.check(self._look.newest_chunk())
        await self._waiting.wait_past_chunk(place.whole)

    # -- the sessions of the store ----------------------------------------------------------------
    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        self._check_open()
        return self._look.sessions(self._bridge.host, after, limit)

    def owned(self) -> list[tuple[Owner | None, int]]:
        self._check_open()
        return self._look.owned(self._bridge.host)

    def find(self, id_or_name: str) -> KnownSession | None:
        self._check_open()
        return self._look.find(id_or_name, self._bridge.host)

    async def usage(
        self,
        by: UsageBy = "day",
        *,
        since: datetime.date | str | None = None,
        until: datetime.date | str | None = None,
    ) -> list[UsageRow]:
        """Return the usage of the store, see `Log.usage`.

        A history that an older version wrote is read once to count it. In a read-only file each
        handle has to do this.
        """
        query = checked_query(by, since, until)
        while True:
            self._check_open()
            found = await self._bridge.ask(partial(usage_table.find, query=query))
            if not found.uncounted:
                return found.rows
            if not self._bridge.is_writable:
                break
            await self._bridge.call(usage_table.complete_some)
        read = UsageTable()
        for id, agent, number, counted, seq in found.uncounted:
            read.update(await self._usage.count(id, agent, identity=number, begin=counted, end=seq))
        return merged(found.rows, read.rows(query))

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        self._check_open()
        check_text(session, name)
        await self._bridge.call(
            partial(maintenance.rename, session=session, name=name, expected=expected)
        )

    async def trim(self, session: str, before: int) -> int:
        self._check_open()
        before = min(max(before, 0), _SEQ_MAX)
        return await self._bridge.call(partial(maintenance.trim, session=session, before=before))

    async def delete(self, session: str) -> None:
        """Delete a session, see `Log.delete`.

        When it returns, no data of the session is left in the file.

        After a cancellation or a close, the removal of the remaining data continues: after later
        commits, or during the close.
        """
        self._check_open()

        def deleted(gone: Deleted | None, _: bool) -> None:
            self._owned.on_deleted(session, None if gone is None else gone.number)
            if gone is not None and gone.has_rest:
                deleted_sessions.queue_removal(
                    session, self._bridge.put, lambda: self._phase is LogPhase.OPEN, removed
                )

        removed: asyncio.Future[None] = self._loop.create_future()
        gone = await self._bridge.call(partial(maintenance.delete, session=session), then=deleted)
        if gone is not None and gone.has_rest:
            await removed

    def abandon(self) -> None:
        # This also covers a close in progress: a closed event loop receives no end of it.
        if self._phase is not LogPhase.CLOSED:
            self._phase = LogPhase.CLOSED
            self._spools.discard()
            self._bridge.abandon()

    async def close(self) -> None:
        """Commit, complete all calls, and close. Safe to call twice.

        Cancellation does not undo the close, and the completions still come.
        """
        if self._phase is LogPhase.OPEN:
            self._phase = LogPhase.CLOSING
            self._spools.discard()
            self._bridge.stop()
        await asyncio.shield(self._closed)

    # -- health -----------------------------------------------------------------------------------
    async def ready(self) -> None:
        """Return immediately: the constructor has opened the store."""

    def guard(self, guard: OwnershipListener) -> None:
        """Ignore the listener: a kernel lock keeps the ownership while this process lives."""

    def check(self) -> None:
        self.head("")
        self._bridge.check_presence()

    def counters(self) -> Mapping[str, float]:
        return self._bridge.counters()

    @property
    def commit_times(self) -> Histogram:
        return self._bridge.commit_times

    # -- completions ------------------------------------------------------------------------------
    def on_group(self) -> None:
        self._waiting.on_group()

    def _on_appended(self, append: AppendOperation) -> None:
        if append.error is not None:
            self._on_told(append)
            return
        # Nearly every append. It carries no failure.
        if append.entries:
            self._owned.on_appended(append)
        complete(append.session, append.done, None)

    def _on_told(self, call: WriterOperation) -> None:
        # Set before the callback runs, so that the writer can resume from inside its `done`.
        self._told = max(self._told, call.failure)
        error: Any = call.error
        if isinstance(error, NotOwner) and call.is_of_owner:
            self._owned.drop(call.session, call.epoch)
        complete(call.session, call.done, error)

    # -- closing ----------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._phase is not LogPhase.OPEN:
            raise StoreError("the log is closed")

    def _is_late(self, session: str, done: Done) -> bool:
        """Whether the log is closing or closed.

        If so, queue the error behind all earlier completions.
        """
        if self._phase is LogPhase.OPEN:
            return False
        error = StoreError("the log is closed", session=session)
        answer = partial(complete, session, done, error)
        if self._phase is LogPhase.CLOSING:
            self._late.append(answer)
        else:
            self._loop.call_soon(answer)
        return True

    def on_ended(self) -> None:
        # Not earlier: events that were in flight at the close must still wake their waiters first.
        self._owned.close(StoreError("the log is closed"))
        self._phase = LogPhase.CLOSED
        for answer in self._late:
            answer()
        self._late.clear()
        self._closed.set_result(None)
