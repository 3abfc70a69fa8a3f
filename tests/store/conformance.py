"""What every engine of the log must do, sentence by sentence of `banksman.store.log`.

An engine's test module makes a subclass whose `open_log` opens one, and gets all of these. A wrapper that injects
faults, or a cluster, is an engine like any other. Nothing here looks inside: what is checked is what `append` answers,
what `read` returns and what `wait_past` lets through.

Two things an engine may choose, and the tests allow for both. Appends that are not answered yet when another writer
claims the session, or when it is deleted, may be committed or refused, but only as a whole: some from the front, none
behind. And how much a page holds is its own affair as long as it holds an event, is no longer than was asked, and goes
on where the last one ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from banksman.core.event import UPDATE, Entry, Event, entry
from banksman.errors import NotOwner, StoreError, UsageError
from banksman.store.log import READ_EVENTS_MAX, Done, Head, Log

AT = 1700000000.25
# More than any engine may keep when it was told to keep so few.
RETAINED_BYTES = 16 << 10
CHUNKS_MAX = 1000

Refusal = StoreError | NotOwner | None


def lines(*data: bytes) -> list[Entry]:
    return [("t-1", UPDATE, line) for line in data]


def data(events: Sequence[Event]) -> list[bytes]:
    return [event.data for event in events]


class Answers:
    """What a log said to each append, in the order in which it said it."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Refusal]] = []
        self._asked = 0
        self._more: asyncio.Future[None] | None = None

    def done(self) -> Done:
        """The callback of one more append; they are numbered from 0."""
        number, self._asked = self._asked, self._asked + 1

        def done(error: Refusal) -> None:
            self.given.append((number, error))
            if self._more is not None and not self._more.done():
                self._more.set_result(None)

        return done

    async def all(self) -> list[type[Exception] | None]:
        """Wait until each append has its answer; they came once each, and in order. What kind each was."""
        while len(self.given) < self._asked:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        assert [number for number, _ in self.given] == list(range(self._asked))
        return self.kinds

    @property
    def kinds(self) -> list[type[Exception] | None]:
        return [None if error is None else type(error) for _, error in self.given]


class Writer:
    """The owner of a session, and where it believes the session to be. It goes on appending without waiting."""

    def __init__(self, log: Log, session: str = "s") -> None:
        self.log = log
        self.session = session
        self.epoch = log.claim(session)
        self.seq = log.head(session).seq
        self.answers = Answers()

    def append(self, *what: bytes | Entry, epoch: int | None = None, seq: int | None = None, at: float = AT) -> None:
        entries = [("t-1", UPDATE, one) if isinstance(one, bytes) else one for one in what]
        epoch = self.epoch if epoch is None else epoch
        seq = self.seq if seq is None else seq
        answered = len(self.answers.given)
        self.log.append(self.session, epoch, seq, at, entries, self.answers.done())
        assert len(self.answers.given) == answered, "answered inside append"
        if epoch == self.epoch:
            self.seq = seq + len(entries)

    async def commit(self, *what: bytes | Entry) -> None:
        """Append, and wait until it and all before it are committed."""
        self.append(*what)
        assert set(await self.answers.all()) == {None}


async def everything(log: Log, session: str = "s", after: int = 0, limit: int = READ_EVENTS_MAX) -> list[Event]:
    """All that is committed after a seq, page by page, where nothing was dropped."""
    events: list[Event] = []
    while (page := await log.read(session, after, limit)).events:
        assert page.gap is None
        assert len(page.events) <= limit
        assert [event.seq for event in page.events] == list(range(after + 1, after + 1 + len(page.events)))
        events += page.events
        after = events[-1].seq
    return events


async def follow(log: Log, last: int, session: str = "s", after: int = 0, limit: int = 7) -> list[Event]:
    """A reader: takes what is there, waits past it, until the event `last` is there."""
    events: list[Event] = []
    while after < last:
        await log.wait_past(session, after)
        page = await log.read(session, after, limit)
        assert page.events, "woken for an event that cannot be read"
        events += page.events
        after = page.events[-1].seq
    return events


class LogConformance:
    """Subclass it as `Test…` and say how a log is opened."""

    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        """A new, empty log; with `retained_bytes`, one that keeps about so much of a session."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, *, retained_bytes: int | None = None) -> AsyncGenerator[Log]:
        log = await self.open_log(retained_bytes=retained_bytes)
        try:
            yield log
        finally:
            await log.close()

    # One writer at a time.

    async def test_a_session_that_was_never_claimed_is_at_zero_and_not_listed(self) -> None:
        async with self.opened() as log:
            assert log.head("s") == Head(epoch=0, seq=0, first=1)
            assert await log.read("s", 0) == ((), None)
            assert log.sessions() == []

    async def test_each_claim_raises_the_epoch_by_one_and_moves_nothing_else(self) -> None:
        async with self.opened() as log:
            assert [log.claim("s"), log.claim("s")] == [1, 2]
            await Writer(log).commit(b"a", b"b")
            assert log.claim("s") == 4
            assert log.head("s") == Head(epoch=4, seq=2, first=1)

    async def test_who_holds_a_session_may_raise_its_own_epoch_and_nobody_elses(self) -> None:
        async with self.opened() as log:
            held = log.claim("s")
            raised = log.claim("s", held)
            assert raised > held
            with pytest.raises(NotOwner):
                log.claim("s", held)
            with pytest.raises(NotOwner):
                log.claim("never claimed", 1)
            assert log.head("s").epoch == raised
            assert log.sessions() == ["s"]

    async def test_an_append_under_an_older_epoch_is_refused_whatever_it_holds(self) -> None:
        async with self.opened() as log:
            old = Writer(log)
            await old.commit(b"a")
            log.claim("s")
            for what, seq in [((b"x",), 1), ((), 1), ((b"x",), 0), ((b"x", b"y"), 9)]:
                old.append(*what, seq=seq)
            assert (await old.answers.all())[1:] == [NotOwner] * 4
            assert data(await everything(log)) == [b"a"]

    async def test_an_append_under_an_epoch_that_was_never_given_is_refused(self) -> None:
        async with self.opened() as log:
            answers = Answers()
            for epoch in (0, 1):
                log.append("s", epoch, 0, AT, lines(b"x"), answers.done())
            assert await answers.all() == [NotOwner, NotOwner]
            assert log.sessions() == []
            writer = Writer(log)
            writer.append(b"x", epoch=writer.epoch + 1, seq=0)
            assert await writer.answers.all() == [NotOwner]
            assert log.head("s").seq == 0

    @pytest.mark.parametrize("expected_seq", [-1, 0, 1, 3, 4, 1 << 40])
    async def test_an_append_that_expects_another_seq_is_refused(self, expected_seq: int) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            await writer.commit(b"a", b"b")
            writer.append(b"x", seq=expected_seq)
            assert await writer.answers.all() == [None, NotOwner]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_of_two_writers_that_both_believe_to_be_the_owner_one_is_right(self) -> None:
        async with self.opened() as log:
            one = Writer(log)
            answers = Answers()
            one.append(b"one")
            log.append("s", one.epoch, 0, AT, lines(b"two"), answers.done())
            assert await one.answers.all() + await answers.all() == [None, NotOwner]
            assert data(await everything(log)) == [b"one"]

    async def test_a_claim_takes_all_or_none_of_each_unanswered_append_and_the_new_owner_goes_on_from_there(
        self,
    ) -> None:
        async with self.opened() as log:
            old = Writer(log)
            chunks = [(b"a", b"b"), (b"c",), (b"d", b"e", b"f")]
            for chunk in chunks:
                old.append(*chunk)
            new = Writer(log)  # Claims, and takes the head for its own.
            old.append(b"late", seq=new.seq)
            new.append(b"new")
            assert await new.answers.all() == [None]
            kinds = await old.answers.all()
            committed = kinds.count(None)
            assert kinds == [None] * committed + [NotOwner] * (len(kinds) - committed)
            assert committed <= len(chunks)
            assert data(await everything(log)) == [line for chunk in chunks[:committed] for line in chunk] + [b"new"]

    # Answers.

    async def test_no_answer_comes_inside_a_call(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)  # Its own `append` checks that no answer came inside.
            writer.append(b"a")
            writer.append()
            writer.append(b"x", seq=77)
            writer.append(b"x", epoch=77)
            log.claim("s")
            log.head("s")
            log.sessions()
            log.delete("s")
            assert writer.answers.given == []
            assert len(await writer.answers.all()) == 4

    async def test_answers_come_in_the_order_of_the_appends(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            for number in range(50):
                writer.append(*[b"%d" % number] * (number % 3))  # Some hold nothing: they keep their place too.
            writer.append(b"x", seq=1)
            writer.append(b"x", epoch=0)
            writer.append(b"x")
            assert await writer.answers.all() == [None] * 50 + [NotOwner] * 3

    async def test_what_is_answered_is_committed(self) -> None:
        async with self.opened() as log:
            epoch = log.claim("s")
            heads: list[int] = []
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def done(error: Refusal) -> None:
                assert error is None
                heads.append(log.head("s").seq)
                if len(heads) == 3:
                    told.set_result(None)

            for seq in (0, 2, 4):
                log.append("s", epoch, seq, AT, lines(b"a", b"b"), done)
            await told
            assert all(head >= seq for head, seq in zip(heads, (2, 4, 6), strict=True))
            assert data(await everything(log)) == [b"a", b"b"] * 3

    async def test_an_append_of_nothing_commits_nothing_and_is_answered(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            await writer.commit()
            assert log.head("s") == Head(epoch=1, seq=0, first=1)
            await writer.commit(b"a")
            await writer.commit()
            assert log.head("s").seq == 1

    async def test_those_behind_a_failed_one_fail_too(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            writer.append(b"a")
            writer.append(b"x", seq=5)
            writer.append(b"y")
            writer.append()
            writer.append(b"z", seq=1)  # This one would fit, had the two before it not been lost.
            assert await writer.answers.all() == [None, *[NotOwner] * 4]
            assert data(await everything(log)) == [b"a"]

    async def test_one_behind_a_failed_one_fails_even_if_its_seq_fits_by_accident(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            await writer.commit(b"a", b"b")
            writer.append(b"x", b"y", seq=0)
            writer.append(b"z")
            assert writer.seq == 3
            assert (await writer.answers.all())[1:] == [NotOwner, NotOwner]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_a_writer_that_was_told_of_a_failure_may_go_on_from_the_head(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            answers = Answers()
            second, third = answers.done(), answers.done()

            def again(error: Refusal) -> None:
                second(error)
                log.append("s", writer.epoch, log.head("s").seq, AT, lines(b"again"), third)

            writer.append(b"a")
            log.append("s", writer.epoch, 7, AT, lines(b"x"), again)
            assert await answers.all() == [NotOwner, None]
            assert data(await everything(log)) == [b"a", b"again"]

    async def test_a_stale_writer_does_not_fail_the_owner_behind_it(self) -> None:
        async with self.opened() as log:
            old = Writer(log)
            new = Writer(log)
            old.append(b"old")
            new.append(b"a")
            old.append(b"old")
            new.append(b"b")
            assert await old.answers.all() == [NotOwner, NotOwner]
            assert await new.answers.all() == [None, None]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_a_claim_ends_the_failure_of_the_writer_before(self) -> None:
        async with self.opened() as log:
            old = Writer(log)
            old.append(b"x", seq=5)
            new = Writer(log)
            new.append(b"a")
            assert await old.answers.all() == [NotOwner]
            assert await new.answers.all() == [None]

    async def test_a_callback_that_raises_keeps_no_other_from_its_answer(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with self.opened() as log:
            one, two = Writer(log, "one"), Writer(log, "two")

            def fail(error: Refusal) -> None:
                raise ZeroDivisionError(error)

            with caplog.at_level(logging.ERROR, "banksman"):
                log.append("one", one.epoch, 0, AT, lines(b"a"), fail)
                one.append(b"b", seq=1)
                two.append(b"c")
                assert await one.answers.all() == [None]
                assert await two.answers.all() == [None]
            assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]
            assert data(await everything(log, "one")) == [b"a", b"b"]

    async def test_an_append_from_inside_an_answer_is_answered_after_it(self) -> None:
        async with self.opened() as log:
            epoch = log.claim("s")
            seen: list[str] = []
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def first(error: Refusal) -> None:
                seen.append("first begins")
                log.append("s", epoch, 2, AT, lines(b"c"), third)
                seen.append("first ends")

            def second(error: Refusal) -> None:
                seen.append("second")

            def third(error: Refusal) -> None:
                seen.append("third")
                told.set_result(None)

            log.append("s", epoch, 0, AT, lines(b"a"), first)
            log.append("s", epoch, 1, AT, lines(b"b"), second)
            await told
            assert seen == ["first begins", "first ends", "second", "third"]
            assert data(await everything(log)) == [b"a", b"b", b"c"]

    async def test_the_callers_list_is_its_own_again_after_the_append(self) -> None:
        async with self.opened() as log:
            epoch = log.claim("s")
            answers = Answers()
            entries = lines(b"a", b"b")
            log.append("s", epoch, 0, AT, entries, answers.done())
            entries.clear()
            entries += lines(b"x")
            assert await answers.all() == [None]
            assert data(await everything(log)) == [b"a", b"b"]

    # Reading.

    async def test_an_event_is_its_entry_with_its_place(self) -> None:
        async with self.opened() as log:
            name = "a session / with ünusual „name“ \0"
            every_byte = bytes(range(256))
            writer = Writer(log, name)
            writer.append((None, UPDATE, b""), ("t-2", "küchen.sink", every_byte), at=12.5)
            await Writer(log, "other").commit(b"x")
            writer.append(entry("t-3", "turn.ended", outcome="done"), at=0.0)
            assert await writer.answers.all() == [None, None]
            again = Writer(log, name)
            await again.commit(b'{"a": 1}\n')
            assert list(await everything(log, name)) == [
                Event(name, 1, 1, 12.5, None, UPDATE, b""),
                Event(name, 1, 2, 12.5, "t-2", "küchen.sink", every_byte),
                Event(name, 1, 3, 0.0, "t-3", "turn.ended", b'{"outcome":"done"}'),
                Event(name, 2, 4, AT, "t-1", UPDATE, b'{"a": 1}\n'),
            ]

    async def test_seqs_are_dense_across_chunks_and_epochs(self) -> None:
        async with self.opened() as log:
            for size in (1, 3, 2):
                writer = Writer(log)
                writer.append(*[b"x"] * size)
                writer.append(b"y")
                writer.append(b"z", epoch=writer.epoch - 1)
                assert await writer.answers.all() == [None, None, NotOwner]
            events = await everything(log)
            assert [(event.epoch, event.seq) for event in events] == [
                *[(1, 1), (1, 2)],
                *[(2, 3), (2, 4), (2, 5), (2, 6)],
                *[(3, 7), (3, 8), (3, 9)],
            ]

    async def test_a_page_begins_anywhere_and_is_as_long_as_was_asked(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            for size in (1, 3, 1, 1, 4, 2):
                writer.append(*[b"%d of %d" % (number, size) for number in range(size)])
            await writer.commit()
            events = await everything(log)
            assert len(events) == 12
            for after in range(14):
                for limit in (1, 2, 3, 5, 11, 12, 13):
                    page = await log.read("s", after, limit)
                    assert page.gap is None
                    assert list(page.events) == events[after:][: len(page.events)], (after, limit)
                    assert min(1, len(events[after:])) <= len(page.events) <= limit
                    assert await everything(log, after=after, limit=limit) == events[after:]

    async def test_a_page_is_never_longer_than_the_maximum(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            await writer.commit(*[b"x"] * (READ_EVENTS_MAX + 5))
            assert len((await log.read("s", 0)).events) <= READ_EVENTS_MAX
            assert len((await log.read("s", 0, READ_EVENTS_MAX + 1)).events) <= READ_EVENTS_MAX
            assert len(await everything(log)) == READ_EVENTS_MAX + 5

    async def test_there_is_nothing_at_the_head_nor_beyond_it(self) -> None:
        async with self.opened() as log:
            await Writer(log).commit(b"a", b"b")
            for after in (2, 3, 1 << 40):
                assert await log.read("s", after) == ((), None)

    async def test_a_question_that_makes_no_sense_is_refused(self) -> None:
        async with self.opened() as log:
            await Writer(log).commit(b"a")
            for after, limit in ((-1, 1), (0, 0), (0, -1)):
                with pytest.raises(UsageError):
                    await log.read("s", after, limit)
            with pytest.raises(UsageError):
                await log.wait_past("s", -1)

    async def test_readers_see_whole_chunks_only(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            for _ in range(20):
                writer.append(*[b"x"] * 5)
            head = 0
            while head < 100:
                await log.wait_past("s", head)
                before = len(await everything(log))
                head = log.head("s").seq
                assert before % 5 == 0
                assert head % 5 == 0
                assert before <= head
            await writer.answers.all()

    async def test_many_readers_agree_while_writers_follow_one_another(self) -> None:
        async with self.opened() as log:
            dice = random.Random(7)
            readers = [
                asyncio.ensure_future(follow(log, 300, after=after, limit=dice.randint(1, 40)))
                for after in (0, 0, 0, 1, 5, 150, 299)
            ]
            written: list[bytes] = []
            while len(written) < 300:
                writer = Writer(log)
                for _ in range(4):
                    chunk = [b"%d" % dice.randrange(10**6) for _ in range(min(dice.randint(1, 9), 300 - len(written)))]
                    writer.append(*chunk)
                    written += chunk
                    if dice.random() < 0.5:
                        await asyncio.sleep(0)
                assert set(await writer.answers.all()) == {None}
            seen = [await reader for reader in readers]
            events = await everything(log)
            assert data(events) == written
            assert seen == [events[after:] for after in (0, 0, 0, 1, 5, 150, 299)]

    # Waiting.

    async def test_waiting_past_what_is_behind_the_head_ends_at_once(self) -> None:
        async with self.opened() as log:
            await Writer(log).commit(b"a", b"b")
            await log.wait_past("s", 0)
            await log.wait_past("s", 1)

    @pytest.mark.parametrize("moment", ["before the claim", "before the append", "after the append", "at the answer"])
    async def test_no_commit_falls_between_reading_and_waiting(self, moment: str) -> None:
        async with self.opened() as log:
            readers: list[asyncio.Task[list[Event]]] = []
            epoch = 0

            async def begin(now: str) -> None:
                if now == moment:
                    readers.append(asyncio.ensure_future(follow(log, 1)))
                    # The first step of the reader, as far as it goes: it is waiting now, or it has begun to read.
                    await asyncio.sleep(0)

            await begin("before the claim")
            epoch = log.claim("s")
            await begin("before the append")
            answers = Answers()
            answered = answers.done()

            def done(error: Refusal) -> None:
                if moment == "at the answer":
                    readers.append(asyncio.ensure_future(follow(log, 1)))
                answered(error)

            log.append("s", epoch, 0, AT, lines(b"a"), done)
            await begin("after the append")
            assert await answers.all() == [None]
            assert [data(await reader) for reader in readers] == [[b"a"]]

    async def test_one_that_waits_is_let_through_by_the_event_it_waits_for_and_no_other(self) -> None:
        async with self.opened() as log:

            async def wait(seq: int) -> None:
                await log.wait_past("s", seq)
                assert log.head("s").seq > seq
                assert (await log.read("s", seq, 1)).events[0].seq == seq + 1

            waits = [(seq, asyncio.ensure_future(wait(seq))) for seq in (3, 0, 2, 1, 0)]
            writer = Writer(log)
            other = Writer(log, "other")
            for head in (1, 2, 3, 4):
                await other.commit(*[b"x"] * 9)  # Another session's events are no news here.
                writer.append(b"x", epoch=0)  # Nor is what was refused,
                writer.append()  # or what holds nothing.
                await writer.answers.all()
                assert [seq for seq, task in waits if task.done() and seq >= head - 1] == []
                writer.append(b"a")
                assert (await writer.answers.all())[-1] is None
                await asyncio.gather(*[task for seq, task in waits if seq < head])

    async def test_a_wait_that_is_cancelled_leaves_the_others_and_the_writer_alone(self) -> None:
        async with self.opened() as log:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            writer = Writer(log)
            tasks = [asyncio.ensure_future(follow(log, 1)) for _ in range(4)]
            await asyncio.sleep(0)
            tasks[0].cancel()  # While it waits.
            await asyncio.wait(tasks[:1])
            writer.append(b"a")
            tasks[1].cancel()  # Cancelled, but not ended yet, when the commit comes.
            await writer.answers.all()
            tasks[2].cancel()  # It may have been let through already: then it is ended while it reads.
            await asyncio.wait(tasks)
            assert tasks[0].cancelled()
            assert tasks[1].cancelled()
            assert data(await tasks[3]) == [b"a"]
            await writer.commit(b"b")
            assert faults == []

    # Retention.

    async def test_a_reader_behind_what_is_kept_is_told_the_range_and_goes_on_behind_it(self) -> None:
        async with self.opened(retained_bytes=RETAINED_BYTES) as log:
            writer, other = Writer(log), Writer(log, "other")
            await other.commit(b"x")
            written: list[bytes] = []
            while log.head("s").first <= 5:
                assert len(written) < CHUNKS_MAX * 2, "nothing is ever dropped"
                chunk = [b"%d" % (len(written) + number) + b"." * 1000 for number in range(2)]
                await writer.commit(*chunk)
                written += chunk
            epoch, seq, first = log.head("s")
            assert (epoch, seq) == (1, len(written))
            for after in (0, 1, first - 3, first - 2):
                page = await log.read("s", after, 3)
                assert page.gap == (after + 1, first - 1)
                assert data(page.events) == written[first - 1 :][: len(page.events)]
                assert 1 <= len(page.events) <= 3
            for after in (first - 1, first, seq - 1):
                page = await log.read("s", after, 3)
                assert page.gap is None
                assert data(page.events) == written[after:][: len(page.events)]
                assert page.events[0].seq == after + 1
            assert await log.read("s", seq) == ((), None)
            # Each session has its own measure.
            assert data(await everything(log, "other")) == [b"x"]

    # Many sessions.

    async def test_sessions_are_listed_in_the_order_of_their_first_claim(self) -> None:
        async with self.opened() as log:
            for name in ("b", "a", "c", "a", "b"):
                log.claim(name)
            assert log.sessions() == ["b", "a", "c"]

    async def test_two_sessions_do_not_disturb_each_other(self) -> None:
        async with self.opened() as log:
            one, two = Writer(log, "one"), Writer(log, "two")
            one.append(b"1")
            two.append(b"2")
            one.append(b"x", seq=9)
            two.append(b"22")
            one.append(b"xx")
            log.claim("one")
            two.append(b"222")
            log.delete("one")
            two.append(b"2222")
            assert (await one.answers.all())[1:] == [NotOwner, NotOwner]
            assert await two.answers.all() == [None] * 4
            assert log.head("two") == Head(epoch=1, seq=4, first=1)
            assert data(await everything(log, "two")) == [b"2", b"22", b"222", b"2222"]

    # Deleting.

    async def test_a_deleted_session_is_as_if_it_had_never_been(self) -> None:
        async with self.opened() as log:
            for name in ("a", "s", "b"):
                await Writer(log, name).commit(b"a", b"b")
            log.delete("s")
            log.delete("never known")
            assert log.head("s") == Head(epoch=0, seq=0, first=1)
            assert await log.read("s", 0) == ((), None)
            assert log.sessions() == ["a", "b"]
            assert len(await everything(log, "a")) == 2

    async def test_the_writer_of_a_deleted_session_is_refused_for_good(self) -> None:
        async with self.opened() as log:
            log.claim("s")
            old = Writer(log)
            log.delete("s")
            old.append(b"x")
            old.append(b"x", seq=0)
            new = Writer(log)
            assert new.epoch > old.epoch
            assert new.seq == 0
            old.append(b"x", seq=0)
            new.append(b"a")
            assert await old.answers.all() == [NotOwner] * 3
            assert await new.answers.all() == [None]
            assert [(event.epoch, event.seq, event.data) for event in await everything(log)] == [(new.epoch, 1, b"a")]
            assert log.sessions() == ["s"]

    async def test_what_was_appended_before_a_delete_is_gone_and_answered(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            writer.append(b"a")
            writer.append(b"b")
            log.delete("s")
            assert log.head("s").seq == 0
            assert await writer.answers.all() in ([None, None], [None, NotOwner], [NotOwner, NotOwner])
            assert await log.read("s", 0) == ((), None)
            assert log.sessions() == []

    async def test_whoever_waits_on_a_session_that_is_deleted_is_told(self) -> None:
        async with self.opened() as log:
            await Writer(log).commit(b"a")
            waits = [asyncio.ensure_future(log.wait_past("s", seq)) for seq in (1, 2)]
            await asyncio.sleep(0)
            log.delete("s")
            new = Writer(log)
            again = asyncio.ensure_future(follow(log, 1))
            await asyncio.sleep(0)
            await new.commit(b"b", b"c", b"d")
            for wait in waits:
                with pytest.raises(StoreError):
                    await wait
            assert data(await again)[:1] == [b"b"]

    async def test_what_was_not_answered_before_a_delete_lets_nobody_through_after_it(self) -> None:
        async with self.opened() as log:
            writer = Writer(log)
            # It takes its first step after the delete, and before the answer that is due: what it waits for is new.
            reader = asyncio.ensure_future(follow(log, 1))
            writer.append(b"old")
            log.delete("s")
            await writer.answers.all()
            await Writer(log).commit(b"new")
            assert data(await reader) == [b"new"]

    # What only one of them may have.

    async def test_a_lease_has_one_holder_and_whoever_comes_later_is_told_who(self) -> None:
        async with self.opened() as log:
            log.lease("claude:x", "one")
            with pytest.raises(NotOwner, match="one") as raised:
                log.lease("claude:x", "two")
            assert raised.value.ids["session"] == "one"
            assert raised.value.hint
            # To be refused changes nothing: it is refused again, and the holder has it.
            with pytest.raises(NotOwner):
                log.lease("claude:x", "two")
            log.lease("claude:x", "one")

    async def test_a_holder_may_take_its_lease_again_and_gives_it_back_once(self) -> None:
        async with self.opened() as log:
            for _ in range(3):
                log.lease("claude:x", "one")
            log.release("claude:x", "one")
            log.lease("claude:x", "two")
            with pytest.raises(NotOwner, match="two"):
                log.lease("claude:x", "one")

    async def test_what_another_has_is_not_given_back_by_anybody_else(self) -> None:
        async with self.opened() as log:
            log.lease("claude:x", "one")
            log.release("claude:x", "two")
            log.release("claude:never leased", "two")
            with pytest.raises(NotOwner):
                log.lease("claude:x", "two")
            log.release("claude:x", "one")
            # Given back twice: what somebody else has by then is theirs.
            log.lease("claude:x", "two")
            log.release("claude:x", "one")
            with pytest.raises(NotOwner):
                log.lease("claude:x", "one")

    async def test_a_session_may_have_several_leases_and_each_is_its_own(self) -> None:
        async with self.opened() as log:
            log.lease("claude:x", "one")
            log.lease("claude:y", "one")
            log.lease("other:x", "two")
            log.release("claude:x", "one")
            log.lease("claude:x", "two")
            with pytest.raises(NotOwner):
                log.lease("claude:y", "two")

    @pytest.mark.parametrize("is_claimed", [True, False])
    async def test_leases_go_with_their_session(self, is_claimed: bool) -> None:
        async with self.opened() as log:
            if is_claimed:
                log.claim("one")
            log.lease("claude:x", "one")
            log.lease("claude:y", "one")
            log.lease("claude:z", "two")
            log.delete("one")
            log.lease("claude:x", "two")
            log.lease("claude:y", "two")
            log.delete("three")
            with pytest.raises(NotOwner):
                log.lease("claude:z", "one")

    async def test_a_lease_says_nothing_about_who_writes(self) -> None:
        async with self.opened() as log:
            log.lease("claude:x", "s")
            assert log.sessions() == []
            assert log.head("s").epoch == 0
            writer = Writer(log)
            await writer.commit(b"a")
            # Nor does another writer of the session take it away.
            log.claim("s", writer.epoch)
            with pytest.raises(NotOwner):
                log.lease("claude:x", "other")

    # Closing.

    async def test_close_commits_and_answers_what_was_appended(self) -> None:
        log = await self.open_log()
        writer = Writer(log)
        reader = asyncio.ensure_future(log.wait_past("s", 1))
        await asyncio.sleep(0)
        writer.append(b"a")
        writer.append(b"b")
        await log.close()
        assert writer.answers.kinds == [None, None]
        await reader

    async def test_appends_are_refused_from_the_first_moment_of_close(self) -> None:
        log = await self.open_log()
        writer = Writer(log)
        writer.append(b"a")
        closing = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        writer.append(b"b")
        await closing
        writer.append(b"c")
        writer.append()
        writer.append(b"d", epoch=0)
        assert await writer.answers.all() == [None, *[StoreError] * 4]

    async def test_nobody_waits_on_a_closed_log(self) -> None:
        log = await self.open_log()
        await Writer(log).commit(b"a")
        waits = [asyncio.ensure_future(log.wait_past(name, 1)) for name in ("s", "s", "unknown")]
        await asyncio.sleep(0)
        await log.close()
        for wait in waits:
            with pytest.raises(StoreError):
                await wait

    async def test_a_closed_log_says_so(self) -> None:
        log = await self.open_log()
        await Writer(log).commit(b"a")
        await log.close()
        waits: list[Callable[[], Awaitable[object]]] = [lambda: log.read("s", 0), lambda: log.wait_past("s", 0)]
        for wait in waits:
            with pytest.raises(StoreError):
                await wait()
        calls: list[Callable[[], object]] = [
            lambda: log.claim("s"),
            lambda: log.head("s"),
            lambda: log.delete("s"),
            lambda: log.lease("claude:x", "s"),
            lambda: log.release("claude:x", "s"),
            log.sessions,
        ]
        for call in calls:
            with pytest.raises(StoreError):
                call()

    async def test_close_may_be_called_again_and_by_many(self) -> None:
        log = await self.open_log()
        writer = Writer(log)
        writer.append(b"a")
        first = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(log.close(), log.close())
        await log.close()
        await asyncio.wait([first])
        assert await writer.answers.all() == [None]

    # Everything at once, against a list.

    def test_it_does_what_a_list_would(self) -> None:
        open_log = self.open_log

        class OfThisEngine(Machine):
            def __init__(self) -> None:
                super().__init__(open_log)

        run_state_machine_as_test(
            OfThisEngine,
            settings=settings(
                max_examples=60,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


@dataclass
class Session:
    """The naive engine: a list of events, and the appends that are not answered yet."""

    epoch: int
    events: list[Event] = field(default_factory=list[Event])
    unanswered: list[Append] = field(default_factory=list["Append"])
    has_failed: bool = False

    @property
    def seq(self) -> int:
        return len(self.events)

    @property
    def tail(self) -> int:
        return self.seq + sum(len(append.entries) for append in self.unanswered)

    def commit(self, count: int) -> None:
        """The first `count` of the unanswered are in; the others will be refused."""
        for append in self.unanswered[:count]:
            for turn, kind, line in append.entries:
                self.events.append(Event(append.session, append.epoch, self.seq + 1, AT, turn, kind, line))
        for append in self.unanswered[count:]:
            append.expected = {NotOwner}
        self.unanswered.clear()


@dataclass
class Append:
    session: str
    epoch: int
    entries: list[Entry]
    expected: set[type[Exception] | None]
    got: list[Refusal] = field(default_factory=list[Refusal])


NAMES = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    # Most appends are right, or nothing would ever be written; the rest are off by a little, as real ones are.
    st.tuples(
        st.just("append"),
        NAMES,
        st.sampled_from([0, 0, 0, 0, 0, -1, 1]),
        st.sampled_from([0, 0, 0, 0, 0, -2, -1, 1, 2]),
        st.lists(st.binary(max_size=3), max_size=4),
    ),
    st.tuples(st.just("claim"), NAMES),
    st.tuples(st.just("delete"), NAMES),
)


class Machine(RuleBasedStateMachine):
    """Breaths: what one pass of the loop may ask of a log without waiting. After each, log and list must agree."""

    def __init__(self, open_log: Callable[[], Awaitable[Log]]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.log = self.run(open_log())
        self.sessions: dict[str, Session] = {}
        self.epochs: dict[str, int] = {}

    def run(self, wait: Awaitable[Any]) -> Any:
        async def body() -> Any:
            return await wait

        return self.runner.run(body())

    @rule(name=NAMES)
    def claim(self, name: str) -> None:
        self.run(self.breathe([("claim", name)]))

    @rule(steps=st.lists(STEPS, min_size=1, max_size=8))
    def breath(self, steps: list[tuple[Any, ...]]) -> None:
        self.run(self.breathe(steps))

    @rule(name=NAMES, after=st.integers(0, 20), limit=st.integers(1, 8))
    def read(self, name: str, after: int, limit: int) -> None:
        events = self.sessions[name].events if name in self.sessions else []
        page = self.run(self.log.read(name, after, limit))
        assert page.gap is None
        assert list(page.events) == events[after:][: len(page.events)]
        assert min(1, len(events[after:])) <= len(page.events) <= limit

    async def breathe(self, steps: list[tuple[Any, ...]]) -> None:
        self.appends: list[Append] = []
        self.answered: list[Append] = []
        self.told = asyncio.Event()
        # Readers that wait at the head now; in the end it is known which of them had something to wait for.
        heads = {name: session.seq for name, session in self.sessions.items()}
        readers = {name: asyncio.ensure_future(self.log.wait_past(name, seq)) for name, seq in heads.items()}
        await asyncio.sleep(0)
        for step in steps:
            match step:
                case ("append", name, epoch, seq, chunk):
                    self.append(name, epoch, seq, lines(*chunk))
                case ("claim", name):
                    self.take(name)
                case ("delete", name):
                    self.forget(name)
                case _:
                    raise AssertionError(step)
        while len(self.answered) < len(self.appends):
            self.told.clear()
            await self.told.wait()
        for session in self.sessions.values():
            session.commit(len(session.unanswered))
            session.has_failed = False
        await self.agree()
        for name, reader in readers.items():
            await self.check_reader(name, heads[name], reader, was_deleted=("delete", name) in steps)

    async def check_reader(self, name: str, head: int, reader: asyncio.Future[None], *, was_deleted: bool) -> None:
        if was_deleted:
            # It was told so, unless it had been let through before.
            try:
                await reader
            except StoreError:
                pass
        elif self.sessions[name].seq > head:
            await reader
        else:
            assert not reader.done(), "woken for nothing"
            reader.cancel()
            await asyncio.wait([reader])

    def append(self, name: str, epoch_off: int, seq_off: int, entries: list[Entry]) -> None:
        session = self.sessions.get(name)
        # The writer of a deleted session still has its epoch.
        epoch = self.epochs.get(name, 0) + epoch_off
        expected_seq = (session.tail if session else 0) + seq_off
        append = Append(name, epoch, entries, {NotOwner})
        if session is not None and epoch == session.epoch:
            if expected_seq == session.tail and not session.has_failed:
                append.expected = {None}
                session.unanswered.append(append)
            else:
                session.has_failed = True
        self.appends.append(append)

        def done(error: Refusal) -> None:
            append.got.append(error)
            self.answered.append(append)
            self.told.set()

        self.log.append(name, epoch, expected_seq, AT, entries, done)
        assert not append.got, "answered inside append"

    def take(self, name: str) -> None:
        """A claim. The head says how many of the unanswered were committed: whole ones, from the front."""
        epoch = self.log.claim(name)
        session = self.sessions.get(name)
        if session is None:
            # A session that was deleted goes on counting, so that its old writer stays refused.
            assert epoch > self.epochs.get(name, 0)
            self.sessions[name] = session = Session(epoch)
        else:
            assert epoch == session.epoch + 1
        head = self.log.head(name).seq
        count, seq = 0, session.seq
        while count < len(session.unanswered) and seq + len(session.unanswered[count].entries) <= head:
            seq += len(session.unanswered[count].entries)
            count += 1
        assert seq == head, "a claim has cut an append in two"
        for append in session.unanswered[:count]:
            if not append.entries:
                append.expected = {None, NotOwner}  # Of one that holds nothing the head does not tell.
        session.commit(count)
        session.epoch = self.epochs[name] = epoch
        session.has_failed = False

    def forget(self, name: str) -> None:
        self.log.delete(name)
        session = self.sessions.pop(name, None)
        if session is not None:
            for append in session.unanswered:
                append.expected = {None, NotOwner}

    async def agree(self) -> None:
        for append in self.appends:
            assert len(append.got) == 1
            error = append.got[0]
            assert (None if error is None else type(error)) in append.expected, append
        for name in ("a", "b"):
            of_session = [append for append in self.appends if append.session == name]
            assert [append for append in self.answered if append.session == name] == of_session
            session = self.sessions.get(name) or Session(0)
            assert self.log.head(name) == Head(session.epoch, session.seq, 1)
            assert await everything(self.log, name, limit=3) == session.events
        assert self.log.sessions() == list(self.sessions)

    def teardown(self) -> None:
        self.run(self.log.close())
        self.runner.close()
