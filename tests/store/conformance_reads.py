"""Reads of one session: pages, waits, retention, snapshots. Part of the suite in `conformance`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.store.kit import AT, Answers, Opens, Refusal, Writer, chunk, data, everything, follow, known, lines

from banksman.core.session.event import UPDATE, Event, entry
from banksman.errors import NotOwner, StoreError, UsageError
from banksman.store.log_values import READ_EVENTS_MAX, Chunk, Head

# With a limit this low, every engine drops events before CHUNKS_MAX chunks.
RETAINED_BYTES = 16 << 10
CHUNKS_MAX = 1000


class ReadingConformance(Opens):
    # Reading.

    async def test_read_returns_each_entry_with_epoch_seq_and_time(self) -> None:
        async with self.opened() as log:
            name = "a session / with ünusual „name“ \0"
            every_byte = bytes(range(256))
            writer = await Writer.claim(log, name)
            writer.append((None, UPDATE, b""), ("t-2", "küchen.sink", every_byte), at=12.5)
            await (await Writer.claim(log, "other")).commit(b"x")
            writer.append(entry("t-3", "turn.ended", outcome="done"), at=0.0)
            assert await writer.answers.all() == [None, None]
            again = await Writer.claim(log, name)
            await again.commit(b'{"a": 1}\n')
            assert list(await everything(log, name)) == [
                Event(name, writer.epoch, 1, 12.5, None, UPDATE, b""),
                Event(name, writer.epoch, 2, 12.5, "t-2", "küchen.sink", every_byte),
                Event(name, writer.epoch, 3, 0.0, "t-3", "turn.ended", b'{"outcome":"done"}'),
                Event(name, again.epoch, 4, AT, "t-1", UPDATE, b'{"a": 1}\n'),
            ]

    async def test_seqs_are_dense_across_chunks_and_epochs(self) -> None:
        async with self.opened() as log:
            epochs: list[int] = []
            for size in (1, 3, 2):
                writer = await Writer.claim(log)
                writer.append(*[b"x"] * size)
                writer.append(b"y")
                writer.append(b"z", epoch=writer.epoch - 1)
                assert await writer.answers.all() == [None, None, NotOwner]
                epochs += [writer.epoch] * (size + 1)
            events = await everything(log)
            assert [event.seq for event in events] == list(range(1, 10))
            assert [event.epoch for event in events] == epochs

    async def test_read_page_begins_anywhere_and_respects_limit(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
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

    async def test_read_page_never_exceeds_the_maximum(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(*[b"x"] * (READ_EVENTS_MAX + 5))
            assert len((await log.read("s", 0)).events) <= READ_EVENTS_MAX
            assert len((await log.read("s", 0, READ_EVENTS_MAX + 1)).events) <= READ_EVENTS_MAX
            assert len(await everything(log)) == READ_EVENTS_MAX + 5

    async def test_read_at_or_past_head_returns_no_events(self) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a", b"b")
            for after in (2, 3, 1 << 40):
                assert await log.read("s", after) == ((), None)

    async def test_read_refuses_negative_seq_and_limit_below_one(self) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a")
            for after, limit in ((-1, 1), (0, 0), (0, -1)):
                with pytest.raises(UsageError):
                    await log.read("s", after, limit)
            with pytest.raises(UsageError):
                await log.wait_past("s", -1)

    async def test_readers_see_whole_chunks_only(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
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

    async def test_readers_agree_while_writers_replace_one_another(self) -> None:
        async with self.opened() as log:
            dice = random.Random(7)
            readers = [
                asyncio.ensure_future(follow(log, 300, after=after, limit=dice.randint(1, 40)))
                for after in (0, 0, 0, 1, 5, 150, 299)
            ]
            written: list[bytes] = []
            while len(written) < 300:
                writer = await Writer.claim(log)
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

    # Turns.

    async def test_find_turn_returns_where_a_turn_began_and_ended(self) -> None:
        async with self.opened() as log:
            assert await log.find_turn("s", "a") is None
            writer = await Writer.claim(log)
            await writer.commit(b"x", entry("a", "turn.queued"), entry("b", "turn.queued"))
            await writer.commit(entry("b", "turn.started"), b"y", entry("b", "turn.ended"), entry("a", "turn.started"))
            await writer.commit(entry("own", "turn.started"), b"z")
            assert await log.find_turn("s", "a") == (2, None, 9)
            assert await log.find_turn("s", "b") == (3, 6, 9)
            assert await log.find_turn("s", "own") == (8, None, 9)
            for unknown in ("c", "t-1", "", "A"):
                assert await log.find_turn("s", unknown) is None
            assert await log.find_turn("other", "a") is None
            await (await Writer.claim(log)).commit(entry("a", "turn.ended"))
            assert await log.find_turn("s", "a") == (2, 10, 10)

    async def test_find_turn_forgets_a_turn_with_its_last_event(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(entry("a", "turn.queued"), entry("b", "turn.queued"))
            await writer.commit(entry("a", "turn.ended"))
            await writer.commit(entry("b", "turn.ended"), snapshot=b"{}")
            await writer.commit(b"x", snapshot=b"{}")
            await log.trim("s", 4)
            first = log.head("s").first
            for turn, ended in (("a", 3), ("b", 4)):
                found = await log.find_turn("s", turn)
                assert (found is None) == (ended < first), (turn, first)
            writer.release()
            await log.delete("s")
            assert await log.find_turn("s", "b") is None
            await (await Writer.claim(log)).commit(b"x")
            assert await log.find_turn("s", "b") is None

    async def test_find_turn_finds_turns_of_a_restored_session(self) -> None:
        async with self.opened() as log:
            turns = [entry("a", "turn.queued"), entry("a", "turn.ended"), entry("b", "turn.queued")]
            chunks = [Chunk(5, 1, AT, turns), chunk(8, b"x")]
            await log.restore("s", name=None, agent="claude", chunks=lambda: chunks)
            assert await log.find_turn("s", "a") == (5, 6, 8)
            await (await Writer.claim(log)).commit(entry("b", "turn.ended"))
            assert await log.find_turn("s", "b") == (7, 9, 9)
            assert await log.find_turn("s", "c") is None

    # Waiting.

    async def test_wait_past_seq_behind_head_ends_at_once(self) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a", b"b")
            await log.wait_past("s", 0)
            await log.wait_past("s", 1)

    async def test_wait_past_known_session_raises_when_session_is_missing(self) -> None:
        """Otherwise a session that was deleted right before the wait would count as one that is not created yet."""
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"a")
            await log.wait_past("s", 0, is_known=True)
            writer.release()
            await log.delete("s")
            for session in ("s", "never claimed"):
                async with asyncio.timeout(30):
                    with pytest.raises(StoreError, match="deleted"):
                        await log.wait_past(session, 1, is_known=True)

    @pytest.mark.parametrize("moment", ["before the claim", "before the append", "after the append", "at the answer"])
    async def test_read_and_wait_miss_no_commit(self, moment: str) -> None:
        async with self.opened() as log:
            readers: list[asyncio.Task[list[Event]]] = []
            epoch = 0

            async def begin(now: str) -> None:
                if now == moment:
                    readers.append(asyncio.ensure_future(follow(log, 1)))
                    # The reader runs its first step: it waits now, or it has begun to read.
                    await asyncio.sleep(0)

            await begin("before the claim")
            epoch = await log.claim("s", agent="claude")
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

    async def test_wait_past_ends_only_with_the_awaited_event(self) -> None:
        async with self.opened() as log:

            async def wait(seq: int) -> None:
                await log.wait_past("s", seq)
                assert log.head("s").seq > seq
                assert (await log.read("s", seq, 1)).events[0].seq == seq + 1

            waits = [(seq, asyncio.ensure_future(wait(seq))) for seq in (3, 0, 2, 1, 0)]
            writer = await Writer.claim(log)
            other = await Writer.claim(log, "other")
            for head in (1, 2, 3, 4):
                await other.commit(*[b"x"] * 9)  # The events of another session end no wait here.
                writer.append(b"x", epoch=0)  # A refused append ends no wait,
                writer.append()  # and an empty append does not either.
                await writer.answers.all()
                assert [seq for seq, task in waits if task.done() and seq >= head - 1] == []
                writer.append(b"a")
                assert (await writer.answers.all())[-1] is None
                await asyncio.gather(*[task for seq, task in waits if seq < head])

    async def test_cancelled_wait_past_leaves_other_waits_and_writer_alone(self) -> None:
        async with self.opened() as log:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            writer = await Writer.claim(log)
            tasks = [asyncio.ensure_future(follow(log, 1)) for _ in range(4)]
            await asyncio.sleep(0)
            tasks[0].cancel()  # Cancelled while it waits.
            await asyncio.wait(tasks[:1])
            writer.append(b"a")
            tasks[1].cancel()  # Cancelled, but not ended yet, when the commit comes.
            await writer.answers.all()
            tasks[2].cancel()  # The wait may have ended already. Then the cancel hits the read.
            await asyncio.wait(tasks)
            assert tasks[0].cancelled()
            assert tasks[1].cancelled()
            assert data(await tasks[3]) == [b"a"]
            await writer.commit(b"b")
            assert faults == []

    # Retention.

    async def test_tail_wakes_its_reader_after_commits_and_only_then(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"before")
            woken: list[int] = []
            tail = log.tail("s", lambda: woken.append(log.head("s").seq))
            assert tail is not None
            assert (tail.seq, tail.is_live) == (1, True)
            await (await Writer.claim(log, "other")).commit(b"x")
            assert woken == []
            writer.append(b"a")
            writer.append(b"b", b"c")
            assert woken == []
            assert set(await writer.answers.all()) == {None}
            # An engine may commit both appends in one group, and then wakes once.
            assert woken in ([4], [2, 4])
            assert tail.seq == 4
            tail.close()
            await writer.commit(b"d")
            assert len(woken) <= 2

    async def test_tail_ends_when_the_session_is_deleted(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"a")
            woken: list[bool] = []
            tail = log.tail("s", lambda: woken.append(True))
            assert tail is not None
            writer.release()
            await log.delete("s")
            assert woken
            assert not tail.is_live
            assert log.recent("s", 0, 10) is None

    async def test_tail_ends_when_the_log_is_closed(self) -> None:
        woken: list[bool] = []
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a")
            tail = log.tail("s", lambda: woken.append(True))
            assert tail is not None
        assert woken == [True]
        assert not tail.is_live

    async def test_recent_events_are_those_that_a_read_returns(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for size in (1, 3, 2):
                writer.append(*[b"%d" % size] * size)
            assert set(await writer.answers.all()) == {None}
            writer.append(b"not committed yet")
            for after in range(6):
                for limit in (1, 2, 100):
                    found = log.recent("s", after, limit)
                    # Read later: the last append may be committed meanwhile.
                    page = await log.read("s", after, limit)
                    assert found is not None
                    assert found[:limit] == list(page.events)[: len(found)]
            assert log.recent("s", 1000, 1) is None

    async def test_read_reports_gap_to_reader_behind_retention(self) -> None:
        async with self.opened(retained_bytes=RETAINED_BYTES) as log:
            writer, other = await Writer.claim(log), await Writer.claim(log, "other")
            await other.commit(b"x")
            written: list[bytes] = []
            while log.head("s").first <= 5:
                assert len(written) < CHUNKS_MAX * 2, "nothing is ever dropped"
                chunk = [b"%d" % (len(written) + number) + b"." * 1000 for number in range(2)]
                await writer.commit(*chunk, snapshot=b"so far")
                written += chunk
            epoch, seq, first = log.head("s")
            assert (epoch, seq) == (writer.epoch, len(written))
            assert known(log).first == first
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
            # The limit holds for each session separately.
            assert data(await everything(log, "other")) == [b"x"]

    async def test_retention_keeps_events_not_covered_by_last_snapshot(self) -> None:
        async with self.opened(retained_bytes=RETAINED_BYTES) as log:
            writer = await Writer.claim(log)
            for number in range(40):
                await writer.commit(b"%d" % number + b"." * 1000, snapshot=b"at 3" if number == 2 else None)
                assert log.head("s").first <= 4
            assert await log.trim("s", 41) <= 4
            assert data((await log.read("s", 3)).events)[0][:1] == b"3"
            plain = await Writer.claim(log, "without a snapshot")
            for number in range(40):
                await plain.commit(b"%d" % number + b"." * 1000)
            assert await log.trim(plain.session, 41) == 1
            assert len(await everything(log, plain.session)) == 40

    async def test_trim_forgets_whole_chunks_before_a_seq(self) -> None:
        async with self.opened() as log:
            writer, other = await Writer.claim(log), await Writer.claim(log, "other")
            for first in (1, 4, 7, 10):
                await writer.commit(*[b"%d" % seq for seq in range(first, first + 3)], snapshot=b"so far")
            await other.commit(b"x", b"y", snapshot=b"so far")
            for before, first in [(0, 1), (1, 1), (3, 1), (4, 4), (6, 4), (2, 4), (8, 7), (9, 7)]:
                assert await log.trim("s", before) == first, before
                assert log.head("s") == Head(epoch=writer.epoch, seq=12, first=first)
                page = await log.read("s", 0)
                assert page.gap == ((1, first - 1) if first > 1 else None)
                assert data(page.events) == [b"%d" % seq for seq in range(first, 13)]
            # The engine decides whether the very last chunk may be dropped.
            first = await log.trim("s", 1 << 40)
            assert first in (10, 13)
            assert log.head("s") == Head(epoch=writer.epoch, seq=12, first=first)
            await writer.commit(b"13")
            assert data((await log.read("s", 12)).events) == [b"13"]
            assert await log.snapshot("s") == (12, b"so far")
            assert len(await everything(log, "other")) == 2

    async def test_trim_stops_at_the_snapshot_within_a_chunk(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"1", b"2", snapshot=b"at 2")
            await writer.commit(b"3", b"4")
            await writer.commit(b"5", b"6")
            assert await log.trim("s", 7) == 3
            assert await log.trim("s", 7) == 3
            assert data(await everything(log, after=2)) == [b"3", b"4", b"5", b"6"]

    async def test_trim_of_missing_session_does_nothing(self) -> None:
        async with self.opened() as log:
            assert await log.trim("s", 10) == 1
            assert log.sessions() == []

    # Snapshots.

    async def test_snapshot_covers_all_events_up_to_the_last_of_its_append(self) -> None:
        async with self.opened() as log:
            assert await log.snapshot("s") is None
            writer, other = await Writer.claim(log), await Writer.claim(log, "other")
            await writer.commit(b"a")
            assert await log.snapshot("s") is None
            await writer.commit(b"b", b"c", snapshot=b"at 3")
            await writer.commit(b"d")
            assert await log.snapshot("s") == (3, b"at 3")
            await writer.commit(snapshot=b"\0at 4\xff")  # A snapshot without entries covers the events that exist.
            assert await log.snapshot("s") == (4, b"\0at 4\xff")
            await writer.commit(b"e", snapshot=b"")
            assert await log.snapshot("s") == (5, b"")
            assert await log.snapshot("other") is None
            await other.commit(b"x")
            await writer.commit(b"f")
            assert data(await everything(log)) == [b"a", b"b", b"c", b"d", b"e", b"f"]

    async def test_snapshot_returns_the_latest_of_several(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for number in range(1, 6):
                writer.append(b"x", snapshot=b"at %d" % number)
            assert await writer.answers.all() == [None] * 5
            assert await log.snapshot("s") == (5, b"at 5")
            again = await Writer.claim(log)
            assert await log.snapshot("s") == (5, b"at 5")
            await again.commit(b"y", snapshot=b"at 6")
            assert await log.snapshot("s") == (6, b"at 6")

    async def test_snapshot_of_refused_append_is_refused_too(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"a", snapshot=b"at 1")
            writer.append(b"x", epoch=writer.epoch - 1, snapshot=b"stale")
            writer.append(b"x", seq=7, snapshot=b"elsewhere")
            writer.append(seq=1, snapshot=b"behind it")
            assert (await writer.answers.all())[1:] == [NotOwner] * 3
            assert await log.snapshot("s") == (1, b"at 1")

    async def test_snapshot_is_deleted_with_its_session(self) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a", snapshot=b"at 1")
            await log.delete("s")
            assert await log.snapshot("s") is None
            await (await Writer.claim(log)).commit(b"a", b"b")
            assert await log.snapshot("s") is None

    async def test_snapshot_is_never_ahead_of_readable_events(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for number in range(1, 31):
                writer.append(b"x", snapshot=b"at %d" % number)
                snapshot = await log.snapshot("s")
                assert snapshot is None or snapshot.seq <= log.head("s").seq
            seq = 0
            while seq < 30:
                await log.wait_past("s", seq)
                snapshot = await log.snapshot("s")
                assert snapshot is not None
                assert seq < snapshot.seq <= log.head("s").seq
                assert snapshot.data == b"at %d" % snapshot.seq
                seq = snapshot.seq
            assert await writer.answers.all() == [None] * 30
