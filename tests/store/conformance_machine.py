"""Compare the log with a list, for any order of calls with and without waits. Part of the suite in `conformance`.

The list is the reference engine. It knows the required answer of each call, with one exception. When a session is
claimed again, its unanswered appends may be committed or not: some from the front, and none behind a refused one. The
head tells how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.store.kit import AT, Refusal, everything, known, lines, until

from banksman.core.session.event import Entry, Event
from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
from banksman.store.log import Log
from banksman.store.log_values import Done, Head, Snapshot


@dataclass(eq=False)
class Call:
    """Append, advance or lease: the required answers and the actual ones."""

    session: str
    epoch: int
    entries: list[Entry] = field(default_factory=list[Entry])
    snapshot: bytes | None = None
    expected: set[type[Exception] | None] = field(default_factory=lambda: {NotOwner})
    got: list[Refusal] = field(default_factory=list[Refusal])


@dataclass(eq=False)
class Session:
    """Reference engine: a list of events, and the calls without an answer."""

    epoch: int
    name: str | None = None
    is_owned: bool = True
    first: int = 1
    events: list[Event] = field(default_factory=list[Event])
    borders: set[int] = field(default_factory=lambda: {1})
    snapshot: Snapshot | None = None
    unanswered: list[Call] = field(default_factory=list[Call])
    # The first failed call whose failure the writer does not know yet.
    failed: Call | None = None

    @property
    def seq(self) -> int:
        return len(self.events)

    @property
    def tail(self) -> int:
        return self.seq + sum(len(call.entries) for call in self.unanswered)

    @property
    def snapshot_seq(self) -> int:
        """Return the seq of the last snapshot that is committed, or that may be."""
        seq, tail = 0 if self.snapshot is None else self.snapshot.seq, self.seq
        for call in self.unanswered:
            tail += len(call.entries)
            seq = seq if call.snapshot is None else tail
        return seq

    def commit(self, count: int) -> None:
        """Commit the first `count` unanswered calls. The others will be refused."""
        for call in self.unanswered[:count]:
            for turn, kind, line in call.entries:
                self.events.append(Event(call.session, call.epoch, self.seq + 1, AT, turn, kind, line))
            self.borders.add(self.seq + 1)
            if call.snapshot is not None:
                self.snapshot = Snapshot(self.seq, call.snapshot)
        for call in self.unanswered[count:]:
            call.expected = {NotOwner}
        self.unanswered.clear()


SESSIONS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from([None, "x", "y"])
# Most calls are right, otherwise nothing would ever be written. The others have a small error, as real ones do.
EPOCHS_OFF = st.sampled_from([0, 0, 0, 0, 0, -1, 1])
SEQS_OFF = st.sampled_from([0, 0, 0, 0, 0, -2, -1, 1, 2])
STEPS = st.one_of(
    st.tuples(
        st.just("append"), SESSIONS, EPOCHS_OFF, SEQS_OFF, st.lists(st.binary(max_size=3), max_size=4), st.booleans()
    ),
    st.tuples(st.just("advance"), SESSIONS, EPOCHS_OFF),
    st.tuples(st.just("release"), SESSIONS, EPOCHS_OFF),
    st.tuples(st.just("claim"), SESSIONS, NAMES),
    st.tuples(st.just("rename"), SESSIONS, NAMES, st.booleans()),
    st.tuples(st.just("trim"), SESSIONS, st.integers(0, 12)),
    st.tuples(st.just("delete"), SESSIONS),
)


class Machine(RuleBasedStateMachine):
    """Run steps on a log without waiting for answers. After each run the log and the list must agree."""

    def __init__(self, open_log: Callable[[], Awaitable[Log]]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.log = self.run(open_log())
        self.sessions: dict[str, Session] = {}
        self.epochs: dict[str, int] = {}
        # A reader of all sessions: its position, and the last seq of each session that it has seen.
        self.position: str | None = None
        self.seen: dict[str, int] = {}

    def run(self, wait: Awaitable[Any]) -> Any:
        async def body() -> Any:
            return await wait

        return self.runner.run(body())

    @rule(session=SESSIONS, name=NAMES)
    def claim(self, session: str, name: str | None) -> None:
        self.run(self.breathe([("claim", session, name)]))

    @rule(steps=st.lists(STEPS, min_size=1, max_size=8))
    def breath(self, steps: list[tuple[Any, ...]]) -> None:
        self.run(self.breathe(steps))

    @rule(id=SESSIONS, after=st.integers(0, 20), limit=st.integers(1, 8))
    def read(self, id: str, after: int, limit: int) -> None:
        session = self.sessions.get(id) or Session(0)
        page = self.run(self.log.read(id, after, limit))
        start = max(after, session.first - 1)
        is_behind = after < min(start, session.seq)
        assert page.gap == ((after + 1, start) if is_behind else None)
        assert list(page.events) == session.events[start:][: len(page.events)]
        assert min(1, len(session.events[start:])) <= len(page.events) <= limit

    async def breathe(self, steps: list[tuple[Any, ...]]) -> None:
        self.calls: list[Call] = []
        self.answered: list[Call] = []
        self.told = asyncio.Event()
        # Readers that wait at the head now. At the end the test knows which of them had an event to wait for.
        heads = {id: session.seq for id, session in self.sessions.items()}
        readers = {id: asyncio.ensure_future(self.log.wait_past(id, seq)) for id, seq in heads.items()}
        await asyncio.sleep(0)
        for step in steps:
            match step:
                case ("append", id, epoch, seq, data, has_snapshot):
                    self.append(id, epoch, seq, lines(*data), has_snapshot=has_snapshot)
                case ("advance", id, epoch):
                    self.advance(id, epoch)
                case ("release", id, epoch):
                    self.release(id, epoch)
                case ("claim", id, name):
                    await self.take(id, name)
                case ("rename", id, name, is_expected):
                    await self.rename(id, name, is_expected=is_expected)
                case ("trim", id, before):
                    await self.trim(id, before)
                case ("delete", id):
                    await self.forget(id)
                case _:
                    raise AssertionError(step)
        while len(self.answered) < len(self.calls):
            self.told.clear()
            await self.told.wait()
        for session in self.sessions.values():
            session.commit(len(session.unanswered))
            assert session.failed is None, "all were told"
        await self.agree()
        await self.agree_in_order()
        for id, reader in readers.items():
            await self.check_reader(id, heads[id], reader, was_deleted=("delete", id) in steps)

    async def check_reader(self, id: str, head: int, reader: asyncio.Future[None], *, was_deleted: bool) -> None:
        if was_deleted:
            # The reader gets the error, unless its wait ended before the delete.
            try:
                await reader
            except StoreError:
                pass
        elif self.sessions[id].seq > head:
            await reader
        else:
            assert not reader.done(), "woken for nothing"
            reader.cancel()
            await asyncio.wait([reader])

    # -- calls that do not wait --------------------------------------------------------------------------------------
    def append(self, id: str, epoch_off: int, seq_off: int, entries: list[Entry], *, has_snapshot: bool) -> None:
        session = self.sessions.get(id)
        # The writer of a deleted session still has its epoch.
        epoch = self.epochs.get(id, 0) + epoch_off
        expected_seq = (session.tail if session else 0) + seq_off
        # The head does not show whether a claim committed a snapshot without entries, so such a snapshot is not tested
        # here.
        snapshot = b"%d" % len(entries) if has_snapshot and entries else None
        call = Call(id, epoch, entries, snapshot)
        self.expect(call, fits=seq_off == 0)
        self.log.append(id, epoch, expected_seq, AT, entries, self.done(call), snapshot)
        assert not call.got, "answered inside the call"

    def advance(self, id: str, epoch_off: int) -> None:
        call = Call(id, self.epochs.get(id, 0) + epoch_off)
        self.expect(call, fits=True)
        if call.expected == {None}:
            self.epochs[id] += 1
            self.sessions[id].epoch = self.epochs[id]
        self.log.advance(id, call.epoch, self.done(call))
        assert not call.got, "answered inside the call"

    def release(self, id: str, epoch_off: int) -> None:
        session, epoch = self.sessions.get(id), self.epochs.get(id, 0) + epoch_off
        if session is not None and session.is_owned and epoch == session.epoch:
            session.is_owned = False
            # The release comes after these appends: the next claim finds them committed.
            session.commit(len(session.unanswered))
        self.log.release(id, epoch)

    def expect(self, call: Call, *, fits: bool) -> None:
        self.calls.append(call)
        session = self.sessions.get(call.session)
        if session is None or not session.is_owned or call.epoch != session.epoch:
            return
        if fits and session.failed is None:
            call.expected = {None}
            session.unanswered.append(call)
        elif session.failed is None:
            session.failed = call

    def done(self, call: Call) -> Done:
        def done(error: Refusal) -> None:
            call.got.append(error)
            self.answered.append(call)
            session = self.sessions.get(call.session)
            if session is not None and session.failed is call:
                session.failed = None
            self.told.set()

        return done

    # -- calls that wait ---------------------------------------------------------------------------------------------
    async def take(self, id: str, name: str | None) -> None:
        """Claim the session. The head tells how many unanswered appends were committed: whole ones, from the front."""
        session = self.sessions.get(id)
        if session is None and self.is_taken(name, id):
            try:
                await self.log.claim(id, name=name, agent="claude")
            except NameTaken:
                return
            raise AssertionError("a name was given twice")
        epoch = await self.log.claim(id, name=name, agent="claude" if session is None else None)
        # The epoch is higher than any that a writer may hold. A deleted session continues its epochs, so that its old
        # writer stays refused.
        assert epoch > self.epochs.get(id, 0)
        if session is None:
            self.sessions[id] = session = Session(epoch, name)
        head = self.log.head(id).seq
        count, seq = 0, session.seq
        while count < len(session.unanswered) and seq + len(session.unanswered[count].entries) <= head:
            seq += len(session.unanswered[count].entries)
            count += 1
        assert seq == head, "a claim has cut an append in two"
        for call in session.unanswered[:count]:
            if not call.entries:
                call.expected = {None, NotOwner}  # The head does not show whether an empty append was committed.
        session.commit(count)
        session.epoch = self.epochs[id] = epoch
        session.is_owned = True
        session.failed = None

    def is_taken(self, name: str | None, id: str) -> bool:
        return name is not None and any(one.name == name for other, one in self.sessions.items() if other != id)

    async def rename(self, id: str, name: str | None, *, is_expected: bool) -> None:
        session = self.sessions.get(id)
        expected = session.name if session is not None and is_expected else "another"
        try:
            await self.log.rename(id, name, expected=expected)
        except UsageError:
            assert session is None or not is_expected
        except NameTaken:
            assert self.is_taken(name, id)
        else:
            assert session is not None
            assert is_expected
            assert not self.is_taken(name, id)
            session.name = name

    async def trim(self, id: str, before: int) -> None:
        session = self.sessions.get(id)
        if session is None:
            assert await self.log.trim(id, before) == 1
            return
        # The session's commits can arrive at any time. So the limit counts all calls that were made.
        allowed = max(session.first, min(before, session.snapshot_seq + 1))
        first = await self.log.trim(id, before)
        assert session.first <= first <= allowed
        session.first = first

    async def forget(self, id: str) -> None:
        await self.log.delete(id)
        session = self.sessions.pop(id, None)
        self.seen.pop(id, None)
        if session is not None:
            for call in session.unanswered:
                call.expected = {None, NotOwner}

    # -- agreement with the model ------------------------------------------------------------------------------------
    async def agree(self) -> None:
        for call in self.calls:
            assert len(call.got) == 1
            error = call.got[0]
            assert (None if error is None else type(error)) in call.expected, call
        for id in ("a", "b"):
            of_session = [call for call in self.calls if call.session == id]
            assert [call for call in self.answered if call.session == id] == of_session
            session = self.sessions.get(id) or Session(0)
            assert self.log.head(id) == Head(session.epoch, session.seq, session.first)
            assert session.first in session.borders
            after = session.first - 1
            assert await everything(self.log, id, after=after, limit=3) == session.events[after:]
            assert await self.log.snapshot(id) == session.snapshot
        assert [one.id for one in self.log.sessions()] == list(self.sessions)
        for id, session in self.sessions.items():
            await until(lambda id=id, session=session: (known(self.log, id).owner is not None) is session.is_owned)
            assert known(self.log, id)[:6] == (id, session.name, "claude", session.epoch, session.seq, session.first)

    async def agree_in_order(self) -> None:
        """Check that a reader of all sessions sees each new event, and a gap for each event that is gone."""
        new: list[Event] = []
        gaps: dict[str, int] = {}
        while (page := await self.log.read_many(self.position, 3)).events:
            new += [placed.event for placed in page.events]
            gaps |= page.gaps
            self.position = page.position
        gaps |= page.gaps
        for id, session in self.sessions.items():
            seen = self.seen.get(id, 0)
            assert [event for event in new if event.session == id] == session.events[max(seen, session.first - 1) :]
            assert gaps.pop(id, seen) == max(seen, session.first - 1)
            self.seen[id] = session.seq
        assert gaps == {}
        assert {event.session for event in new} <= set(self.sessions)

    def teardown(self) -> None:
        self.run(self.log.close())
        self.runner.close()
