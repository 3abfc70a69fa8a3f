"""The log in memory: for programs that need no history beyond their own life, and for tests.

It promises what every engine does (`log.py`), and forgets: past `bytes_max` a session's oldest chunks are dropped, as
far as its last snapshot allows, and a reader behind them is told the range. What follows is how it works, and what it
decides where the protocol leaves it open.

It is a store with one handle, so whatever is owned is owned here, and nobody is ever kept from a claim. What a released
session had leased is given back with it, and so no lease is ever held by a session that nobody has.

Every token of every agent comes through `append`, so an append costs what a chunk costs, not what its entries do. What
is accepted lies in its session at once (`memory_session.py`), and one flush per pass of the loop commits for all of
them.

All is decided in `append`, `advance` and `lease`, for nothing can go wrong later: what was accepted will be committed.
The answer still comes from the flush. Under the right epoch an append is refused for one of two reasons: its expected
seq is wrong, or it is behind a call that was refused and of which the writer has not been told yet. The second matters
where the seq of the one behind fits by accident; it ends with the telling, so that a writer that knows may go on from
the head.

`claim`, `release`, `trim` and `delete` commit first what was accepted, then take effect: the new owner finds all of it,
and its writer is told None. They call no `done`; answers come from the loop alone.

No epoch is given twice for a session, not even if it was deleted in between: its old writer would be the owner again.
One number for the whole log is enough for that, the highest epoch that was ever deleted: new sessions begin past it.

After `close` everything raises `StoreError` or answers with it, reading too: an engine with a disk could not read
either, and a program that works here must work there. Only `release` says nothing, since the close has done what it
asks for. Whoever waits past the head is told the same, and so is who waits on a session that is deleted: the event it
waits for would belong to another history.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from banksman.core.session.event import Entry, Project
from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
from banksman.store.log import (
    READ_EVENTS_MAX,
    Chunk,
    Done,
    Head,
    KnownSession,
    LogPhase,
    MultiSessionPage,
    Owner,
    OwnershipListener,
    Page,
    ProjectOf,
    Snapshot,
    TurnPlace,
    check_after,
    check_seq,
    checked,
    checked_limit,
)
from banksman.store.memory_session import (
    BEGINNING,
    MemorySession,
    Place,
    PointWaiters,
    place_of,
    placed_after,
    position_of,
)

# Of each session. A long day of one agent fits; a thousand sessions at their bound would not, and belong on a disk.
SESSION_BYTES_MAX = 64 << 20

log = logging.getLogger("banksman")


class _Answer(NamedTuple):
    done: Done
    error: StoreError | NotOwner | None
    session: MemorySession | None


class MemoryLog:
    """A `Log` that keeps at most `bytes_max` of each session besides what its last snapshot does not hold, and nothing
    beyond its own life. Opened inside a loop."""

    is_durable: bool = False

    def __init__(self, *, bytes_max: int = SESSION_BYTES_MAX) -> None:
        if bytes_max < 1:
            raise UsageError("a log must keep something", hint="bytes_max is 1 or more", bytes_max=bytes_max)
        self._loop = asyncio.get_running_loop()
        self._bytes_max = bytes_max
        self._phase = LogPhase.OPEN
        self._owner = Owner(pid=os.getpid(), address="", is_here=True, is_alive=True)
        self._sessions: dict[str, MemorySession] = {}
        # The sessions that have something to commit; a dict, for each once and in the order in which they came.
        self._behind: dict[MemorySession, None] = {}
        self._answers: deque[_Answer] = deque()
        self._is_flush_due = False
        # By session, and not in it: one may wait for a session that nobody has claimed yet.
        self._waiters: dict[str, PointWaiters[int]] = {}
        self._order_waiters: PointWaiters[Place] = PointWaiters()
        self._epoch_deleted_max = 0
        # What is leased, and by which session; each of them has one lease at most, and says so itself.
        self._leases: dict[str, MemorySession] = {}
        # The last chunk's number, and where the order of what is committed ends.
        self._number = 0
        self._end = BEGINNING
        # See `counters`. What this engine has accepted it cannot fail to commit.
        self._counters: dict[str, float] = dict.fromkeys(
            ("commits", "events", "bytes", "commit_seconds", "failures"), 0.0
        )

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiters.values())) + len(self._order_waiters)
        return (
            f"<MemoryLog {self._phase.name} sessions={len(self._sessions)} unanswered={len(self._answers)} "
            f"waiting={waiting}>"
        )

    # -- owning ------------------------------------------------------------------------------------------------------
    async def claim(self, session: str, *, name: str | None = None, agent: str | None = None) -> int:
        self._check_open()
        self._commit()
        state = self._sessions.get(session)
        if state is None:
            if not agent:
                raise UsageError("there is no such session", hint="was it deleted?", session=session)
            self._check_name(name, session)
            state = MemorySession(session, name=name, agent=agent, epoch=self._epoch_deleted_max, at=time.time())
            self._sessions[session] = state
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
            error = NotOwner(
                f"{name} is in the hands of session {holder.id}", hint="close that one first", session=holder.id
            )
        self._answer(_Answer(done, error, state))
        if error is None:
            assert state is not None
            self._give_back(state)
            if name is not None:
                self._leases[name] = state
                state.lease = name

    # -- writing -----------------------------------------------------------------------------------------------------
    def append(  # noqa: PLR0917  The protocol's own signature, called once per chunk: names would cost.
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
                self._counters["events"] += len(entries)
                self._counters["bytes"] += state.weight - weight + len(snapshot or b"")
            else:
                error = NotOwner(
                    "the session is not where its writer believes",
                    hint="claim it anew",
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
        """In the loop's own thread: what is restored into memory fits there, and nothing can come in between."""
        self._check_open()
        if session in self._sessions:
            raise UsageError("there is such a session already", hint="delete it, or take another id", session=session)
        self._check_name(name, session)
        history = list(checked(session, chunks()))
        if snapshot is not None and not snapshot.is_beside(history[0].first, history[-1].last):
            raise UsageError("the snapshot is not of these events", session=session, seq=snapshot.seq)
        state = MemorySession(session, name=name, agent=agent, epoch=0, at=history[0].at)
        state.seq = state.tail = history[0].first - 1
        for chunk in history:
            state.epoch = chunk.epoch
            self._accept(state, chunk.at, chunk.entries, None)
        state.snapshot = snapshot
        # Past what was ever given here under this id, too.
        state.epoch = max(state.epoch, self._epoch_deleted_max)
        self._sessions[session] = state
        self._commit()

    # -- reading -----------------------------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        self._check_open()
        state = self._sessions.get(session)
        return Head(0, 0, 1) if state is None else state.head

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        check_after(session, after)
        limit = checked_limit(limit)
        # A reader far behind reads page after page: without a pause it would keep the loop from everybody else.
        await asyncio.sleep(0)
        self._check_open()
        state = self._sessions.get(session)
        if state is None or after >= state.seq:
            return Page((), None)
        seq = max(after + 1, state.first)
        last = min(state.seq, seq + limit - 1)
        return Page(state.events(seq, last, project), (after + 1, seq - 1) if after + 1 < seq else None)

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
        # From this look to the future's place among the waiters nothing else can run, so no commit falls between.
        head = self.head(session)
        if is_known and not head.epoch:
            raise StoreError("the session was deleted", session=session)
        if head.seq > seq:
            return
        waiters = self._waiters.setdefault(session, PointWaiters())
        try:
            await waiters.past(seq)
        finally:
            # Another set may be in its place by now, if this one was emptied by a delete.
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
        # All was looked through, and what is not wanted need not be again: a reader that waits past its position must
        # not be let through by it.
        return MultiSessionPage(events, position_of(self._end), gaps)

    async def wait_past_position(self, position: str) -> None:
        self._check_open()
        place = place_of(position, self._end)
        if self._end <= place:
            await self._order_waiters.past(place)

    # -- the sessions of the store -----------------------------------------------------------------------------------
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

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        self._check_open()
        state = self._sessions.get(session)
        if state is None:
            raise UsageError("there is no such session", session=session)
        if state.name != expected:
            raise UsageError("the session has another name by now", session=session, name=state.name, expected=expected)
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
            waiters.fail(StoreError("the session was deleted", session=session))

    def abandon(self) -> None:
        """There is nothing to let go of, and nobody to tell."""
        self._phase = LogPhase.CLOSED

    async def ready(self) -> None:
        """At once."""

    def guard(self, guard: OwnershipListener) -> None:
        """What is claimed here stays ours for as long as we live."""

    def check(self) -> None:
        self._check_open()

    def counters(self) -> Mapping[str, float]:
        return dict(self._counters)

    async def close(self) -> None:
        """Commit, answer, let go. Safe to call twice; cancelling it does not undo it, and the answers still come."""
        if self._phase is LogPhase.OPEN:
            self._commit()
            self._phase = LogPhase.CLOSED
            for session, waiters in self._waiters.items():
                waiters.fail(StoreError("the log is closed", session=session))
            self._order_waiters.fail(StoreError("the log is closed"))
            self._waiters.clear()
            self._leases.clear()
            self._sessions.clear()
        # Behind every answer that is due: when this one is given, all of them were.
        answered: asyncio.Future[None] = self._loop.create_future()

        def done(_: StoreError | NotOwner | None) -> None:
            if not answered.done():
                answered.set_result(None)

        self._answer(_Answer(done, None, None))
        await answered

    # -- deciding ----------------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._phase is LogPhase.CLOSED:
            raise StoreError("the log is closed")

    def _named(self, name: str) -> MemorySession | None:
        return next((state for state in self._sessions.values() if state.name == name), None)

    def _check_name(self, name: str | None, session: str) -> None:
        holder = None if name is None else self._named(name)
        if holder is not None and holder.id != session:
            raise NameTaken(f"another session has the name {name}", hint="take another name", session=holder.id)

    def _refusal(self, state: MemorySession | None, session: str, epoch: int) -> StoreError | NotOwner | None:
        if self._phase is LogPhase.CLOSED:
            return StoreError("the log is closed", session=session)
        if state is None or epoch != state.epoch:
            current = 0 if state is None else state.epoch
            return NotOwner(
                "another writer has the session", hint="claim it anew", session=session, epoch=epoch, current=current
            )
        if not state.is_owned:
            return NotOwner("the session was released", hint="claim it anew", session=session, epoch=epoch)
        if state.failed is not None:
            return NotOwner("what was called before this was refused", session=session, epoch=epoch)
        return None

    def _decided(
        self, state: MemorySession | None, epoch: int, error: StoreError | NotOwner | None, done: Done
    ) -> None:
        answer = _Answer(done, error, state)
        # Who is no owner, or no longer, does not fail the one who is.
        if error is not None and state is not None and epoch == state.epoch and state.failed is None:
            state.failed = answer
        self._answer(answer)

    def _accept(self, state: MemorySession, at: float, entries: Sequence[Entry], snapshot: bytes | None) -> None:
        if entries:
            self._number += 1
            state.accept(self._number, at, entries)
            self._behind[state] = None
        if snapshot is not None:
            state.accept_snapshot(snapshot)
            self._behind[state] = None

    def _give_back(self, state: MemorySession) -> None:
        """What it has leased, if anything."""
        if state.lease is not None:
            del self._leases[state.lease]
            state.lease = None

    # -- answering ---------------------------------------------------------------------------------------------------
    def _answer(self, answer: _Answer) -> None:
        self._answers.append(answer)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._commit()
        try:
            # Those that are born of these answers come in the next pass: a writer that appends whenever it is answered
            # must not keep the loop.
            for _ in range(len(self._answers)):
                self._give(self._answers.popleft())
        finally:
            # Also reached when a `done` let a KeyboardInterrupt through: the others are still owed their answers.
            self._is_flush_due = bool(self._answers)
            if self._is_flush_due:
                self._loop.call_soon(self._flush)

    def _give(self, answer: _Answer) -> None:
        # Before it is told, so that the writer may append anew from inside its `done`.
        if answer.session is not None and answer.session.failed is answer:
            answer.session.failed = None
        try:
            answer.done(answer.error)
        except Exception:
            # It is that writer's bug, and the others wait for their answers.
            session = None if answer.session is None else answer.session.id
            log.exception("! session=%s the callback of a writer failed", session)

    def _commit(self) -> None:
        if not self._behind:
            return
        began = time.perf_counter()
        for state in self._behind:
            state.commit()
            state.drop_beyond(self._bytes_max)
            self._end = max(self._end, state.end)
            if (waiters := self._waiters.get(state.id)) is not None:
                waiters.reach(state.seq)
        self._behind.clear()
        self._order_waiters.reach(self._end)
        self._counters["commits"] += 1
        self._counters["commit_seconds"] += time.perf_counter() - began
