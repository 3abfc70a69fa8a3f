"""The log in memory: for programs that need no history beyond their own life, and for tests.

It promises what every engine does (`log.py`), and forgets: past `bytes_max` a session's oldest chunks are dropped, and
a reader behind them is told the range. What follows is how it works, and what it decides where the protocol leaves it
open.

Every token of every agent comes through `append`, so an append costs what a chunk costs, not what its entries do: the
entries are kept as they came, one tuple, and become events only when somebody reads them. A chunk lies in its session's
list from the moment it is accepted, but readers see no further than `seq`, the committed head, which one flush per pass
of the loop moves for all sessions. Between `seq` and `tail` lies what is accepted and not yet committed.

All is decided in `append`, for nothing can go wrong later: what was accepted will be committed. The answer still comes
from the flush. Under the right epoch an append is refused for one of two reasons: its expected seq is wrong, or it is
behind one that was refused and of which the writer has not been told yet. The second matters where the seq of the one
behind fits by accident; it ends with the telling, so that a writer that knows may go on from the head.

`claim` and `delete` commit first what was accepted, then take effect: the new owner finds all of it, and its writer is
told None. They call no `done`; answers come from the loop alone.

No epoch is given twice for a session, not even if it was deleted in between: its old writer would be the owner again.
One number for the whole log is enough for that, the highest epoch that was ever deleted: new sessions begin past it.

After `close` all but `append` and `close` raise `StoreError`, reading too: an engine with a disk could not read either,
and a program that works here must work there. Whoever waits past the head is told the same, and so is who waits on a
session that is deleted: the event it waits for would belong to another history.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from banksman.core.event import Entry, Event, Project
from banksman.errors import NotOwner, StoreError, UsageError
from banksman.store.log import READ_EVENTS_MAX, Done, Head, Page

# Of each session. A long day of one agent fits; a thousand sessions at their bound would not, and belong on a disk.
SESSION_BYTES_MAX = 64 << 20
# What an entry and a chunk weigh besides their data: the tuple (64) and the head of the bytes (33), rounded up as the
# allocator does, and a place in the chunk; the chunk with its numbers, and two places in the list, since what is
# dropped may leave as many empty ones. Without them, empty entries would fill the memory and never the bound. The turn
# and the kind weigh nothing: one string serves all entries of a turn.
ENTRY_BYTES = 128
CHUNK_BYTES = 320

log = logging.getLogger("banksman")


class _Phase(enum.Enum):
    OPEN, CLOSED = range(2)


class _Chunk(NamedTuple):
    first: int
    epoch: int
    at: float
    entries: tuple[Entry, ...]
    weight: int


# Stands where a chunk was, until the list is shortened.
_DROPPED = _Chunk(0, 0, 0.0, (), 0)
_first = attrgetter("first")
_data = itemgetter(2)


class _Answer(NamedTuple):
    done: Done
    error: StoreError | NotOwner | None
    session: _Session | None


class _Session:
    """One session's chunks, oldest first. `chunks[:dropped]` are gone; `seq` and `tail` are where chunks end."""

    __slots__ = ("chunks", "dropped", "epoch", "failed", "name", "seq", "tail", "weight")

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.seq = 0
        self.tail = 0
        self.chunks: list[_Chunk] = []
        self.dropped = 0
        self.weight = 0
        # The first failure under this epoch of which the writer has not been told.
        self.failed: _Answer | None = None

    @property
    def first(self) -> int:
        return self.chunks[self.dropped].first if self.chunks else self.seq + 1

    def drop(self, bytes_max: int) -> None:
        """Drop the oldest chunks until the rest fits. The newest stays, whatever it weighs, or nobody could read it."""
        while self.weight > bytes_max and self.dropped < len(self.chunks) - 1:
            self.weight -= self.chunks[self.dropped].weight
            self.chunks[self.dropped] = _DROPPED
            self.dropped += 1
        # To shorten a list at its front moves all the rest: only once half of it is gone, so that each chunk is moved
        # about once.
        if self.dropped * 2 > len(self.chunks):
            del self.chunks[: self.dropped]
            self.dropped = 0

    def events(self, seq: int, last: int, project: Project | None) -> list[Event]:
        """The events from `seq` to `last`, both kept and committed."""
        assert self.first <= seq
        assert last <= self.seq
        events: list[Event] = []
        # Never a dropped place: they are all before `dropped`, and the one there begins at or before `seq`.
        place = bisect_right(self.chunks, seq, lo=self.dropped, key=_first) - 1
        while seq <= last:
            first, epoch, at, entries, _ = self.chunks[place]
            wanted = entries[seq - first : last + 1 - first]
            assert wanted, f"seq {seq} is not in the chunk at {first}"
            events += [
                Event(self.name, epoch, number, at, turn, kind, data, project)
                for number, (turn, kind, data) in enumerate(wanted, seq)
            ]
            seq += len(wanted)
            place += 1
        return events


class MemoryLog:
    """A `Log` that keeps at most `bytes_max` of each session, and nothing beyond its own life. Opened inside a loop."""

    is_durable: bool = False

    def __init__(self, *, bytes_max: int = SESSION_BYTES_MAX) -> None:
        if bytes_max < 1:
            raise UsageError("a log must keep something", hint="bytes_max is 1 or more", bytes_max=bytes_max)
        self._loop = asyncio.get_running_loop()
        self._bytes_max = bytes_max
        self._phase = _Phase.OPEN
        self._sessions: dict[str, _Session] = {}
        # The sessions that have something to commit; each once, because it is added as its tail leaves its seq.
        self._behind: list[_Session] = []
        self._answers: deque[_Answer] = deque()
        self._is_flush_due = False
        # By session, and not in it: one may wait for a session that nobody has claimed yet. A future's result is the
        # error to raise, so that none is lost with a future whose task was cancelled meanwhile.
        self._waiters: dict[str, dict[asyncio.Future[StoreError | None], int]] = {}
        self._epoch_deleted_max = 0
        # What is leased, and by which session.
        self._leases: dict[str, str] = {}

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiters.values()))
        return (
            f"<MemoryLog {self._phase.name} sessions={len(self._sessions)} unanswered={len(self._answers)} "
            f"waiting={waiting}>"
        )

    def claim(self, session: str, held: int | None = None) -> int:
        self._check_open()
        self._commit()
        state = self._sessions.get(session)
        if held is not None and (state is None or state.epoch != held):
            raise NotOwner(f"the session {session} was claimed by another writer", session=session, epoch=held)
        if state is None:
            state = self._sessions[session] = _Session(session, self._epoch_deleted_max)
        state.epoch += 1
        state.failed = None
        return state.epoch

    def lease(self, name: str, session: str) -> None:
        self._check_open()
        holder = self._leases.setdefault(name, session)
        if holder != session:
            raise NotOwner(f"{name} is in the hands of session {holder}", hint="close that one first", session=holder)

    def release(self, name: str, session: str) -> None:
        self._check_open()
        if self._leases.get(name) == session:
            del self._leases[name]

    def append(  # noqa: PLR0917  The protocol's own signature, called once per chunk: names would cost.
        self, session: str, epoch: int, expected_seq: int, at: float, entries: Sequence[Entry], done: Done
    ) -> None:
        state = self._sessions.get(session)
        error = self._refusal(state, session, epoch, expected_seq)
        answer = _Answer(done, error, state)
        if error is None:
            assert state is not None
            if entries:
                self._accept(state, at, entries)
        elif state is not None and epoch == state.epoch and state.failed is None:
            state.failed = answer
        self._answer(answer)

    def head(self, session: str) -> Head:
        self._check_open()
        state = self._sessions.get(session)
        return Head(0, 0, 1) if state is None else Head(state.epoch, state.seq, state.first)

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        if after < 0:
            raise UsageError("no event is before the first", hint="after is 0 or more", session=session, after=after)
        if limit < 1:
            raise UsageError("a page holds an event or more", hint="limit is 1 or more", session=session, limit=limit)
        # A reader far behind reads page after page: without a pause it would keep the loop from everybody else.
        await asyncio.sleep(0)
        self._check_open()
        state = self._sessions.get(session)
        if state is None or after >= state.seq:
            return Page((), None)
        seq = max(after + 1, state.first)
        last = min(state.seq, seq + min(limit, READ_EVENTS_MAX) - 1)
        return Page(state.events(seq, last, project), (after + 1, seq - 1) if after + 1 < seq else None)

    async def wait_past(self, session: str, seq: int) -> None:
        if seq < 0:
            raise UsageError("no event is before the first", hint="seq is 0 or more", session=session, seq=seq)
        # From this look to the future's place among the waiters nothing else can run, so no commit falls between.
        if self.head(session).seq > seq:
            return
        future: asyncio.Future[StoreError | None] = self._loop.create_future()
        waiters = self._waiters.setdefault(session, {})
        waiters[future] = seq
        try:
            error = await future
        finally:
            waiters.pop(future, None)
            # Another set may be in its place by now, if this one was emptied by a delete.
            if not waiters and self._waiters.get(session) is waiters:
                del self._waiters[session]
        if error is not None:
            raise error

    def sessions(self) -> list[str]:
        self._check_open()
        return list(self._sessions)

    def delete(self, session: str) -> None:
        self._check_open()
        self._commit()
        # Also of one that was never claimed: a lease is taken before that.
        self._leases = {name: holder for name, holder in self._leases.items() if holder != session}
        state = self._sessions.pop(session, None)
        if state is None:
            return
        self._epoch_deleted_max = max(self._epoch_deleted_max, state.epoch)
        self._give_up(session, "the session was deleted")

    async def close(self) -> None:
        """Commit, answer, let go. Safe to call twice; cancelling it does not undo it, and the answers still come."""
        if self._phase is _Phase.OPEN:
            self._commit()
            self._phase = _Phase.CLOSED
            for session in list(self._waiters):
                self._give_up(session, "the log is closed")
            self._sessions.clear()
        # Behind every answer that is due: when this one is given, all of them were.
        answered: asyncio.Future[None] = self._loop.create_future()

        def done(_: StoreError | NotOwner | None) -> None:
            if not answered.done():
                answered.set_result(None)

        self._answer(_Answer(done, None, None))
        await answered

    def _check_open(self) -> None:
        if self._phase is _Phase.CLOSED:
            raise StoreError("the log is closed")

    def _refusal(
        self, state: _Session | None, session: str, epoch: int, expected_seq: int
    ) -> StoreError | NotOwner | None:
        if self._phase is _Phase.CLOSED:
            return StoreError("the log is closed", session=session)
        if state is None or epoch != state.epoch:
            current = 0 if state is None else state.epoch
            return NotOwner(
                "another writer has the session", hint="claim it anew", session=session, epoch=epoch, current=current
            )
        if state.failed is not None:
            return NotOwner("an append before this one was refused", session=session, epoch=epoch)
        if expected_seq != state.tail:
            return NotOwner(
                "the session is not where its writer believes",
                hint="claim it anew",
                session=session,
                expected_seq=expected_seq,
                seq=state.tail,
            )
        return None

    def _accept(self, state: _Session, at: float, entries: Sequence[Entry]) -> None:
        kept = tuple(entries)  # The caller may go on using its list.
        weight = sum(map(len, map(_data, kept))) + ENTRY_BYTES * len(kept) + CHUNK_BYTES
        state.chunks.append(_Chunk(state.tail + 1, state.epoch, at, kept, weight))
        if state.tail == state.seq:
            self._behind.append(state)
        state.tail += len(kept)
        state.weight += weight

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
            name = None if answer.session is None else answer.session.name
            log.exception("! session=%s the callback of an append failed", name)

    def _commit(self) -> None:
        for state in self._behind:
            assert state.seq < state.tail
            state.seq = state.tail
            state.drop(self._bytes_max)
            for future, seq in self._waiters.get(state.name, {}).items():
                if seq < state.seq and not future.done():
                    future.set_result(None)
        self._behind.clear()

    def _give_up(self, session: str, why: str) -> None:
        for future in self._waiters.pop(session, {}):
            if not future.done():
                future.set_result(StoreError(why, session=session))
