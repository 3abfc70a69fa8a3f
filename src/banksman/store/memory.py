"""In-memory log engine, for tests and for programs that need no history beyond their own life.

It implements the protocol of `log.py` with a memory limit. `memory_session.py` stores each session,
and `memory_commit.py` commits. Past `bytes_max` the engine drops a session's oldest chunks, as far
as the last snapshot allows. A reader behind them gets the dropped range as a gap. The rest of this
text describes how the engine works, and its choices where the protocol leaves a choice.

**Ownership.** The store has one handle, so this host owns every owned session, and no claim fails
because of another owner. A release gives back the session's lease, so no unowned session ever holds
a lease.

**Cost.** Every token of every agent passes through `append`. So an append costs per chunk, not per
entry. The session stores an accepted append immediately (`memory_session.py`). One flush per pass
of the event loop commits for all sessions (`memory_commit.py`).

**Decisions.** `append`, `advance` and `lease` decide immediately, because nothing can fail later:
an accepted append will be committed. The completion still comes from the flush. Under the right
epoch an append is refused for one of two reasons. Its expected seq is wrong, or it follows a
refused call that its writer does not know about yet. The second rule matters if the seq of the
later append fits by accident. It ends when the writer receives the refusal, so that the writer can
resume from the head.

**Order.** `claim`, `release`, `trim` and `delete` first commit all accepted appends, then take
effect. So the new owner finds these appends, and their writer receives None. These methods call no
`done`; completions come only from the event loop.

**Epochs.** No epoch is issued twice for a session id, not even across a deletion, or the old writer
would be the owner again. One number per log is enough for that: the highest deleted epoch. New
sessions begin past it.

**After `close`** every call raises `StoreError` or completes with it, reads too. An engine with a
disk could not read either, and a program that works with this engine must work with that one. Only
`release` does nothing, because the close has already released everything. Tasks that wait past the
head get the same error. A task that waits on a deleted session gets an error too, because the event
that it waits for would belong to another history.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
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
    ProjectOf,
    Snapshot,
    TurnPlace,
    UsageBy,
    UsageRow,
)
from banksman.store.memory_commit import Completion, GroupCommit, PointWaiters
from banksman.store.memory_session import MemorySession, place_of, placed_after, position_of
from banksman.store.preconditions import check_after, check_seq, checked, checked_limit
from banksman.store.usage_sums import UsageTable, checked_query

# Limit per session. A long day of one agent fits. A thousand sessions at this limit would not fit,
# and belong on a disk.
SESSION_BYTES_MAX = 64 << 20


class MemoryLog(GroupCommit):
    """A `Log` without persistence. It belongs to the event loop in which it was opened.

    `bytes_max`: the memory limit of each session. Events that the last snapshot does not cover are
    kept in addition.
    """

    is_durable: bool = False
    # No process outlives a store in memory, so its name need not be unique.
    identity: str = "memory"

    def __init__(self, *, bytes_max: int = SESSION_BYTES_MAX) -> None:
        if bytes_max < 1:
            message = f"bytes_max cannot be {bytes_max!r}"
            raise UsageError(message, hint="pass 1 or more", bytes_max=bytes_max)
        super().__init__(bytes_max)
        self._phase = LogPhase.OPEN
        self._owner = Owner(pid=os.getpid(), address="", is_here=True, is_alive=True)
        self._sessions: dict[str, MemorySession] = {}
        self._epoch_deleted_max = 0
        # Lease name to session. A session has at most one lease and also records it.
        self._leases: dict[str, MemorySession] = {}
        self._usage = UsageTable()

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiters.values())) + len(self._order_waiters)
        return (
            f"<MemoryLog {self._phase.name} sessions={len(self._sessions)} "
            f"unanswered={len(self._answers)} waiting={waiting}>"
        )

    # -- owning -----------------------------------------------------------------------------------
    async def claim(
        self, session: str, *, name: str | None = None, agent: str | None = None
    ) -> int:
        self._check_open()
        self._commit()
        state = self._sessions.get(session)
        if state is None:
            if not agent:
                message = f"cannot claim session {session}: there is no such session"
                raise UsageError(message, hint="check whether it was deleted", session=session)
            self._check_name(name, session)
            state = MemorySession(
                session, name=name, agent=agent, epoch=self._epoch_deleted_max, at=time.time()
            )
            self._sessions[session] = state
        # The epoch skips one value if the session is owned: its fenced-off writer may still advance
        # to it.
        state.epoch = state.epoch_past + 1
        state.is_owned = True
        state.failed = None
        self._give_back(state)
        return state.epoch

    def advance(self, session: str, epoch: int, done: Done) -> None:
        state = self._sessions.get(session)
        error = self._refusal(state, session, epoch)
        self._decided(state, epoch, error, done)
        if error is None:
            assert state is not None
            state.epoch += 1

    def release(self, session: str, epoch: int) -> None:
        state = self._sessions.get(session)
        if state is None or not state.is_owned or epoch != state.epoch:
            return
        self._commit()
        self._give_back(state)
        state.is_owned = False

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        state = self._sessions.get(session)
        error = self._refusal(state, session, epoch)
        holder = state if name is None else self._leases.get(name, state)
        if error is None and holder is not state:
            assert holder is not None
            assert holder.is_owned
            message = f"cannot lease {name}: session {holder.id} holds it"
            error = NotOwner(message, hint="close that session first", session=holder.id)
        self._answer(Completion(done, error, state))
        if error is None:
            assert state is not None
            self._give_back(state)
            if name is not None:
                self._leases[name] = state
                state.lease = name

    # -- writing ----------------------------------------------------------------------------------
    # The signature is the protocol's. It is called once per chunk: keyword arguments would cost
    # time.
    def append(  # noqa: PLR0917
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        state = self._sessions.get(session)
        error = self._refusal(state, session, epoch)
        if error is None:
            assert state is not None
            if expected_seq == state.tail:
                weight = state.weight
                self._accept(state, at, entries, snapshot)
                self._usage.add_entries(session, state.agent, at, entries)
                self._counters["events"] += len(entries)
                self._counters["bytes"] += state.weight - weight + len(snapshot or b"")
            else:
                error = NotOwner(
                    f"cannot append to session {session}: its last seq is not {expected_seq}",
                    hint="open the session again, or use it at its owner",
                    session=session,
                    expected_seq=expected_seq,
                    seq=state.tail,
                )
        self._decided(state, epoch, error, done)

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

        This runs in the event loop's thread: the history fits into memory, and no other task can
        run in between.
        """
        self._check_open()
        if session in self._sessions:
            message = f"cannot restore session {session}: it exists already"
            raise UsageError(message, hint="delete it, or use another id", session=session)
        self._check_name(name, session)
        history = list(checked(session, chunks()))
        if snapshot is not None and not snapshot.is_beside(history[0].first, history[-1].last):
            message = f"cannot restore session {session}: the snapshot is of other events"
            raise UsageError(message, session=session, seq=snapshot.seq)
        state = MemorySession(session, name=name, agent=agent, epoch=0, at=history[0].at)
        state.seq = state.tail = history[0].first - 1
        for chunk in history:
            state.epoch = chunk.epoch
            self._accept(state, chunk.at, chunk.entries, None)
        state.snapshot = snapshot
        # No epoch may be issued twice for this id, also not one from before a deletion in this
        # store.
        state.epoch = max(state.epoch, self._epoch_deleted_max)
        self._sessions[session] = state
        self._commit()

    # -- reading ----------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        self._check_open()
        state = self._sessions.get(session)
        return Head(0, 0, 1) if state is None else state.head

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        check_after(session, after)
        limit = checked_limit(limit)
        # A reader far behind reads page after page. Without this pause it would block the event
        # loop for all other tasks.
        await asyncio.sleep(0)
        self._check_open()
        state = self._sessions.get(session)
        if state is None or after >= state.seq:
            return Page((), None)
        seq = max(after + 1, state.first)
        last = min(state.seq, seq + limit - 1)
        return Page(
            state.events(seq, last, project), (after + 1, seq - 1) if after + 1 < seq else None
        )

    def recent(
        self, session: str, after: int, limit: int, project: Project | None = None
    ) -> list[Event] | None:
        state = self._sessions.get(session)
        if state is None or after >= state.seq or after + 1 < state.first:
            return None
        return state.events(after + 1, min(state.seq, after + limit), project)

    def tail(self, session: str, wake: Callable[[], None]) -> LogTail | None:
        state = self._sessions.get(session)
        return None if state is None else self._tails.open(session, state.seq, wake)

    async def find_turn(self, session: str, turn: str) -> TurnPlace | None:
        self._check_open()
        state = self._sessions.get(session)
        return None if state is None else state.turns.find(turn)

    async def snapshot(self, session: str) -> Snapshot | None:
        self._check_open()
        state = self._sessions.get(session)
        return None if state is None else state.snapshot

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        check_seq(session, seq)
        # No other code runs from this lookup until the future is registered, so no commit falls in
        # between.
        head = self.head(session)
        if is_known and not head.epoch:
            message = f"cannot wait for events of session {session}: it was deleted"
            raise StoreError(message, session=session)
        if head.seq > seq:
            return
        waiters = self._waiters.setdefault(session, PointWaiters())
        try:
            await waiters.past(seq)
        finally:
            # `self._waiters` may hold a newer object for this id, if a delete emptied this one.
            if not waiters and self._waiters.get(session) is waiters:
                del self._waiters[session]

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        limit = checked_limit(limit)
        await asyncio.sleep(0)
        self._check_open()
        place = place_of(after, self._end)
        wanted = self._sessions if sessions is None else dict.fromkeys(sessions)
        states = [state for id in wanted if (state := self._sessions.get(id)) is not None]
        gaps = {state.id: state.first - 1 for state in states if state.last_dropped > place}
        events = placed_after(states, place, limit, project_of)
        if len(events) == limit:
            return MultiSessionPage(events, events[-1].position, gaps)
        # All events were examined, and events of unwanted sessions need not be examined again. So
        # the position is the end of the log. Otherwise these events would wake a reader in
        # `wait_past_position` again.
        return MultiSessionPage(events, position_of(self._end), gaps)

    async def wait_past_position(self, position: str) -> None:
        self._check_open()
        place = place_of(position, self._end)
        if self._end <= place:
            await self._order_waiters.past(place)

    # -- the sessions of the store ----------------------------------------------------------------
    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        self._check_open()
        states = iter(self._sessions.values())
        if after is not None:
            for state in states:
                if state.id == after:
                    break
        return [state.known(self._owner) for state in itertools.islice(states, limit)]

    def owned(self) -> list[tuple[Owner | None, int]]:
        self._check_open()
        count = sum(state.is_owned for state in self._sessions.values())
        return [(self._owner, count), (None, len(self._sessions) - count)]

    def find(self, id_or_name: str) -> KnownSession | None:
        self._check_open()
        state = self._sessions.get(id_or_name) or self._named(id_or_name)
        return None if state is None else state.known(self._owner)

    async def usage(
        self,
        by: UsageBy = "day",
        *,
        since: datetime.date | str | None = None,
        until: datetime.date | str | None = None,
    ) -> list[UsageRow]:
        query = checked_query(by, since, until)
        self._check_open()
        return self._usage.rows(query)

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        self._check_open()
        state = self._sessions.get(session)
        if state is None:
            message = f"cannot rename session {session}: there is no such session"
            raise UsageError(message, session=session)
        if state.name != expected:
            message = f"cannot rename session {session}: its name has changed meanwhile"
            raise UsageError(message, session=session, name=state.name, expected=expected)
        self._check_name(name, session)
        state.name = name

    async def trim(self, session: str, before: int) -> int:
        self._check_open()
        self._commit()
        state = self._sessions.get(session)
        if state is not None:
            state.drop_before(before)
        return self.head(session).first

    async def delete(self, session: str) -> None:
        self._check_open()
        self._commit()
        state = self._sessions.pop(session, None)
        if state is None:
            return
        self._give_back(state)
        self._epoch_deleted_max = max(self._epoch_deleted_max, state.epoch_past)
        if (waiters := self._waiters.pop(session, None)) is not None:
            message = f"cannot wait for events of session {session}: it was deleted"
            waiters.fail(StoreError(message, session=session))
        self._tails.end(session)

    def abandon(self) -> None:
        """Mark the log as closed.

        It holds no resources, and no loop runs that could deliver completions.
        """
        self._phase = LogPhase.CLOSED

    async def ready(self) -> None:
        """Return immediately."""

    def guard(self, guard: OwnershipListener) -> None:
        """Ignore the listener: this host owns its sessions for as long as it lives."""

    def check(self) -> None:
        self._check_open()

    def counters(self) -> Mapping[str, float]:
        return dict(self._counters)

    async def close(self) -> None:
        """Commit, complete all calls, and close. Safe to call twice.

        Cancellation does not undo the close, and the completions still come.
        """
        if self._phase is LogPhase.OPEN:
            self._commit()
            self._phase = LogPhase.CLOSED
            for session, waiters in self._waiters.items():
                waiters.fail(StoreError("the log is closed", session=session))
            self._order_waiters.fail(StoreError("the log is closed"))
            self._tails.end_all()
            self._waiters.clear()
            self._leases.clear()
            self._sessions.clear()
        # This completion is queued last, so all earlier ones have run when it runs.
        answered: asyncio.Future[None] = self._loop.create_future()

        def done(_: StoreError | NotOwner | None) -> None:
            if not answered.done():
                answered.set_result(None)

        self._answer(Completion(done, None, None))
        await answered

    # -- decisions --------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._phase is LogPhase.CLOSED:
            raise StoreError("the log is closed")

    def _named(self, name: str) -> MemorySession | None:
        return next((state for state in self._sessions.values() if state.name == name), None)

    def _check_name(self, name: str | None, session: str) -> None:
        holder = None if name is None else self._named(name)
        if holder is not None and holder.id != session:
            message = f"another session has the name {name}"
            raise NameTaken(message, hint="use another name", session=holder.id)

    def _refusal(
        self, state: MemorySession | None, session: str, epoch: int
    ) -> StoreError | NotOwner | None:
        """Return why a call under this epoch is refused, or None."""
        if self._phase is LogPhase.CLOSED:
            return StoreError("the log is closed", session=session)
        if state is None or epoch != state.epoch:
            current = 0 if state is None else state.epoch
            message = f"cannot write session {session}: another writer owns it"
            hint = "open the session again, or use it at its owner"
            return NotOwner(message, hint=hint, session=session, epoch=epoch, current=current)
        if not state.is_owned:
            message = f"cannot write session {session}: it was released"
            return NotOwner(
                message,
                hint="open the session again, or use it at its owner",
                session=session,
                epoch=epoch,
            )
        if state.failed is not None:
            message = f"cannot write session {session}: an earlier call was refused"
            return NotOwner(message, session=session, epoch=epoch)
        return None

    def _give_back(self, state: MemorySession) -> None:
        """Give back the session's lease, if it has one."""
        if state.lease is not None:
            del self._leases[state.lease]
            state.lease = None
