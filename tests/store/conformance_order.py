"""Reads of many sessions, in commit order. Part of the suite in `conformance`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.store.kit import AT, Opens, Writer, data, everything, everything_placed, follow_all

from banksman.core.session.event import Event, Project
from banksman.errors import HistoryLost, StoreError, UsageError
from banksman.store.log_values import READ_EVENTS_MAX


def what(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.session, event.seq) for event in events]


class OrderConformance(Opens):
    async def test_read_many_returns_events_in_commit_order(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            await one.commit(b"a", b"b")
            await two.commit(b"c")
            one.advance()
            await one.commit(b"d")
            await two.commit(b"e", b"f", b"g")
            placed = await everything_placed(log)
            events = [one.event for one in placed]
            assert data(events) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
            assert len({one.position for one in placed}) == 7
            for session in ("one", "two"):
                assert [event for event in events if event.session == session] == await everything(log, session)

    async def test_read_many_keeps_each_sessions_order_in_group_commits(self) -> None:
        async with self.opened() as log:
            dice = random.Random(11)
            writers = [await Writer.claim(log, f"s{number}") for number in range(5)]
            for number in range(200):
                writer = dice.choice(writers)
                writer.append(*[b"%d" % number] * dice.randint(1, 4))
                if dice.random() < 0.1:
                    await writer.answers.all()
            for writer in writers:
                await writer.answers.all()
            events = [one.event for one in await everything_placed(log, limit=17)]
            assert sorted(what(events)) == sorted(
                (writer.session, seq) for writer in writers for seq in range(1, writer.seq + 1)
            )
            for writer in writers:
                assert [event for event in events if event.session == writer.session] == await everything(
                    log, writer.session
                )
            # The order is the same for every page size.
            assert [one.event for one in await everything_placed(log, limit=3)] == events

    async def test_read_many_resumes_from_any_position_even_inside_a_chunk(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            for size in (1, 3, 2):
                await one.commit(*[b"x"] * size)
                await two.commit(*[b"y"] * size)
            placed = await everything_placed(log)
            assert len(placed) == 12
            for index, (position, _) in enumerate(placed):
                for limit in (1, 2, 5, 12, 13):
                    assert await everything_placed(log, position, limit) == placed[index + 1 :]
                    page = await log.read_many(position, limit)
                    assert list(page.events) == placed[index + 1 :][: len(page.events)]
                    assert min(1, len(placed[index + 1 :])) <= len(page.events) <= limit

    async def test_read_many_of_empty_log_returns_a_usable_position(self) -> None:
        async with self.opened() as log:
            page = await log.read_many(None)
            assert (list(page.events), dict(page.gaps)) == ([], {})
            await log.claim("s", agent="claude")
            again = await log.read_many(page.position)
            assert (list(again.events), dict(again.gaps)) == ([], {})
            await (await Writer.claim(log)).commit(b"a", b"b")
            for position in (None, page.position, again.position):
                assert [one.event.data for one in await everything_placed(log, position)] == [b"a", b"b"]

    async def test_read_many_page_never_exceeds_the_maximum(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(*[b"x"] * (READ_EVENTS_MAX + 5))
            assert len((await log.read_many(None)).events) <= READ_EVENTS_MAX
            assert len((await log.read_many(None, READ_EVENTS_MAX + 1)).events) <= READ_EVENTS_MAX
            assert len(await everything_placed(log)) == READ_EVENTS_MAX + 5

    async def test_read_many_returns_only_the_requested_sessions(self) -> None:
        async with self.opened() as log:
            writers = {name: await Writer.claim(log, name) for name in "abc"}
            for name in "abcbbac":
                await writers[name].commit(b"x")
            for wanted in (["a"], ["a", "c"], ["b", "unknown"], ["unknown"], [], ["c", "b", "a", "a"]):
                for limit in (1, 2, 10):
                    events = [one.event for one in await everything_placed(log, None, limit, wanted)]
                    sessions = [event.session for event in events]
                    assert sessions == [name for name in "abcbbac" if name in wanted], (wanted, limit)

    async def test_filtered_reader_is_not_woken_by_other_sessions(self) -> None:
        """An empty page moves a filtered reader past the events of other sessions.

        Otherwise each wait would end immediately.
        """
        async with self.opened() as log:
            quiet, loud = await Writer.claim(log, "quiet"), await Writer.claim(log, "loud")
            await quiet.commit(b"a")
            for _ in range(20):
                await loud.commit(b"x", b"y")
            pages, position = 0, None
            while True:
                page = await log.read_many(position, sessions=["quiet"])
                position, pages = page.position, pages + 1
                assert pages < 10, "it never comes to rest"
                wait = asyncio.ensure_future(log.wait_past_position(position))
                if not page.events:
                    break
                wait.cancel()
                await asyncio.wait([wait])
            reader = asyncio.ensure_future(follow_all(log, 2, sessions=["quiet"]))
            await asyncio.sleep(0)
            assert not wait.done()
            await quiet.commit(b"b")
            await wait
            assert data(await reader) == [b"a", b"b"]

    async def test_read_many_of_no_sessions_returns_the_end_in_one_page(self) -> None:
        """The call returns the position from which to follow new events. It reads no event, however many there are."""
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for _ in range(30):
                await writer.commit(b"x")
            end = (await log.read_many(None, 1, sessions=())).position
            assert (await log.read_many(end)).events in ([], ())
            await writer.commit(b"y")
            assert [one.event.data for one in await everything_placed(log, end)] == [b"y"]

    async def test_read_many_projects_frames_per_session(self) -> None:
        async with self.opened() as log:
            for name in ("one", "two", "plain"):
                await (await Writer.claim(log, name)).commit(b"x")

            def project_of(session: str) -> Project | None:
                def project(data: bytes) -> list[dict[str, Any]]:
                    return [{"by": session, "data": data}]

                return None if session == "plain" else Project(project)

            page = await log.read_many(None, project_of=project_of)
            assert {one.event.session: one.event.body["updates"] for one in page.events} == {
                "one": [{"by": "one", "data": b"x"}],
                "two": [{"by": "two", "data": b"x"}],
                "plain": [],
            }

    @pytest.mark.parametrize(
        "garbage", ["", "x", "-1", "-1.0", "1.x", "é.ü", "{} ", " {}", "{}\n", "{}x", "0{}", "{}{}"]
    )
    async def test_read_many_refuses_malformed_position(self, garbage: str) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a", b"b", b"c")
            position = garbage.replace("{}", (await everything_placed(log))[1].position)
            with pytest.raises(UsageError):
                await log.read_many(position)
            with pytest.raises(UsageError):
                await log.wait_past_position(position)

    async def test_read_many_raises_history_lost_for_position_of_a_longer_store(self) -> None:
        async with self.opened() as long, self.opened() as short:
            writer = await Writer.claim(long)
            for _ in range(5):
                await writer.commit(b"x", b"y")
            await (await Writer.claim(short)).commit(b"x")
            end = (await everything_placed(long))[-1].position
            with pytest.raises(HistoryLost):
                await short.read_many(end)
            with pytest.raises(HistoryLost):
                await short.wait_past_position(end)

    async def test_read_many_refuses_limit_below_one(self) -> None:
        async with self.opened() as log:
            for limit in (0, -1):
                with pytest.raises(UsageError):
                    await log.read_many(None, limit)

    # Retention and deletion.

    async def test_read_many_reports_gap_per_session_to_reader_behind_retention(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            beginning = (await log.read_many(None)).position
            for number in range(4):
                await one.commit(b"%d" % number, b"%d" % number, snapshot=b"so far")
                await two.commit(b"x")
            placed = await everything_placed(log)
            assert await log.trim("one", 5) == 5
            kept = [one for one in placed if one.event.session == "two" or one.event.seq >= 5]
            for position in (None, beginning):
                page = await log.read_many(position)
                assert dict(page.gaps) == {"one": 4}
                assert list(page.events) == kept[: len(page.events)]
                assert dict((await log.read_many(position, sessions=["two"])).gaps) == {}
                assert dict((await log.read_many(position, 1, sessions=["one"])).gaps) == {"one": 4}
            for index, (position, event) in enumerate(placed):
                page = await log.read_many(position, 3)
                # The reader gets the gap if a dropped event comes after its position.
                is_behind = any(after.event.session == "one" and after.event.seq <= 4 for after in placed[index + 1 :])
                assert dict(page.gaps) == ({"one": 4} if is_behind else {}), (position, event.seq)
                left = [one for one in placed[index + 1 :] if one in kept]
                assert list(page.events) == left[: len(page.events)]
                assert len(page.events) >= min(1, len(left))

    async def test_read_many_skips_events_of_deleted_session(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            for number in range(3):
                await one.commit(b"one %d" % number)
                await two.commit(b"two %d" % number)
            placed = await everything_placed(log)
            await log.delete("one")
            for index, (position, _) in enumerate(placed):
                left = [after for after in placed[index + 1 :] if after.event.session == "two"]
                assert await everything_placed(log, position) == left
            end = placed[-1].position
            await log.delete("two")
            assert await everything_placed(log) == []
            # Later events come after every earlier position.
            wait = asyncio.ensure_future(log.wait_past_position(end))
            again = await Writer.claim(log, "one")
            await again.commit(b"again")
            await wait
            assert [one.event.data for one in await everything_placed(log, end)] == [b"again"]

    # Waiting.

    async def test_wait_past_position_ends_with_next_commit_in_any_session(self) -> None:
        async with self.opened() as log:
            position = (await log.read_many(None)).position
            for session in ("one", "two", "one", "three"):
                wait = asyncio.ensure_future(log.wait_past_position(position))
                writer = await Writer.claim(log, session)
                assert await writer.take("claude:x") is None
                writer.release()
                writer = await Writer.claim(log, session)
                writer.append(b"x", epoch=0)
                writer.append()
                writer.append(snapshot=b"no news for a reader")
                await writer.answers.all()
                assert not wait.done(), "woken for nothing"
                writer.append(b"a")
                assert await writer.answers.last() is None
                await wait
                page = await log.read_many(position)
                assert [one.event.session for one in page.events] == [session]
                await log.wait_past_position(position)  # The position is now behind, so the wait ends immediately.
                position = page.position

    async def test_read_many_and_wait_miss_no_commit(self) -> None:
        async with self.opened() as log:
            dice = random.Random(5)
            readers = [asyncio.ensure_future(follow_all(log, 300, limit)) for limit in (1, 2, 7, 50, 1000)]
            writers = [await Writer.claim(log, name) for name in "abc"]
            left = 300
            while left:
                writer, size = dice.choice(writers), min(left, dice.randint(1, 5))
                writer.append(*[b"%d" % (left - number) for number in range(size)])
                left -= size
                if dice.random() < 0.3:
                    await asyncio.sleep(0)
            first, *others = [await reader for reader in readers]
            assert all(other == first for other in others)
            assert [one.event for one in await everything_placed(log)] == first
            for writer in writers:
                assert set(await writer.answers.all()) == {None}

    async def test_cancelled_wait_past_position_leaves_other_waits_alone(self) -> None:
        async with self.opened() as log:
            position = (await log.read_many(None)).position
            writer = await Writer.claim(log)
            waits = [asyncio.ensure_future(log.wait_past_position(position)) for _ in range(3)]
            await asyncio.sleep(0)
            waits[0].cancel()
            await asyncio.wait(waits[:1])
            writer.append(b"a")
            waits[1].cancel()
            await asyncio.wait(waits)
            assert [wait.cancelled() for wait in waits] == [True, True, False]
            await waits[2]
            await writer.commit(b"b")

    async def test_wait_past_position_raises_store_error_when_log_closes(self) -> None:
        log = await self.open_log()
        await (await Writer.claim(log)).commit(b"a")
        position = (await log.read_many(None)).position
        waits = [asyncio.ensure_future(log.wait_past_position(position)) for _ in range(2)]
        await asyncio.sleep(0)
        await log.close()
        for wait in waits:
            with pytest.raises(StoreError):
                await wait

    async def test_read_many_event_equals_event_read_from_its_session(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log, "a session / with ünusual „name“")
            writer.append((None, "küchen.sink", bytes(range(256))), at=12.5)
            writer.append(b"{}\n", at=AT)
            assert await writer.answers.all() == [None, None]
            events = [one.event for one in await everything_placed(log)]
            assert events == await everything(log, writer.session)
