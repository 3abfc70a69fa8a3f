"""Sessions of a store: listing, names, deletion, restore. Part of the suite in `conformance`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
from tests.store.kit import (
    AT,
    Answers,
    Opens,
    Writer,
    chunk,
    data,
    everything,
    everything_placed,
    follow,
    known,
    lines,
    outcomes,
    until,
)

from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
from banksman.store.log import Log
from banksman.store.log_values import NUMBER_MAX, Chunk, Head, Snapshot


def ids(log: Log) -> list[str]:
    return [one.id for one in log.sessions()]


class SessionsConformance(Opens):
    # Many sessions.

    async def test_sessions_are_listed_in_order_of_first_claim(self) -> None:
        async with self.opened() as log:
            for name in ("b", "a", "c", "a", "b"):
                await log.claim(name, agent="claude")
            assert ids(log) == ["b", "a", "c"]

    async def test_sessions_do_not_disturb_each_other(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            one.append(b"1")
            two.append(b"2")
            one.append(b"x", seq=9)
            two.append(b"22")
            one.append(b"xx")
            await log.claim("one", agent="claude")
            two.append(b"222")
            await log.delete("one")
            two.append(b"2222")
            assert (await one.answers.all())[1:] == [NotOwner, NotOwner]
            assert "(open the session again, or use it at its owner)" in str(one.answers.given[1][1])
            assert await two.answers.all() == [None] * 4
            assert log.head("two") == Head(epoch=two.epoch, seq=4, first=1)
            assert data(await everything(log, "two")) == [b"2", b"22", b"222", b"2222"]

    # Deleting.

    async def test_deleted_session_leaves_no_trace(self) -> None:
        async with self.opened() as log:
            for name in ("a", "s", "b"):
                await (await Writer.claim(log, name)).commit(b"a", b"b")
            await log.delete("s")
            await log.delete("never known")
            assert log.head("s") == Head(epoch=0, seq=0, first=1)
            assert await log.read("s", 0) == ((), None)
            assert ids(log) == ["a", "b"]
            assert log.find("s") is None
            assert len(await everything(log, "a")) == 2

    async def test_writer_of_deleted_session_is_refused_even_after_new_claim(self) -> None:
        async with self.opened() as log:
            await log.claim("s", agent="claude")
            old = await Writer.claim(log)
            await log.delete("s")
            old.append(b"x")
            old.append(b"x", seq=0)
            new = await Writer.claim(log)
            assert new.epoch > old.epoch
            assert new.seq == 0
            old.append(b"x", seq=0)
            new.append(b"a")
            assert await old.answers.all() == [NotOwner] * 3
            assert await new.answers.all() == [None]
            assert [(event.epoch, event.seq, event.data) for event in await everything(log)] == [(new.epoch, 1, b"a")]
            assert ids(log) == ["s"]

    async def test_delete_drops_and_answers_pending_appends(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"a")
            writer.append(b"b")
            await log.delete("s")
            assert log.head("s").seq == 0
            assert await writer.answers.all() in ([None, None], [None, NotOwner], [NotOwner, NotOwner])
            assert await log.read("s", 0) == ((), None)
            assert log.sessions() == []

    async def test_delete_fails_pending_waits_on_its_session(self) -> None:
        async with self.opened() as log:
            await (await Writer.claim(log)).commit(b"a")
            waits = [asyncio.ensure_future(log.wait_past("s", seq)) for seq in (1, 2)]
            await asyncio.sleep(0)
            await log.delete("s")
            new = await Writer.claim(log)
            again = asyncio.ensure_future(follow(log, 1))
            await asyncio.sleep(0)
            await new.commit(b"b", b"c", b"d")
            for wait in waits:
                with pytest.raises(StoreError):
                    await wait
            assert data(await again)[:1] == [b"b"]

    async def test_pending_append_before_delete_wakes_no_reader_after_it(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"old")
            await log.delete("s")
            # The read begins after the delete, and the answer can still be due. The reader waits for a new event.
            reader = asyncio.ensure_future(follow(log, 1))
            await asyncio.sleep(0)
            await writer.answers.all()
            await (await Writer.claim(log)).commit(b"new")
            assert data(await reader) == [b"new"]

    # Listing.

    async def test_listing_shows_id_name_agent_times_and_owner(self) -> None:
        async with self.opened() as log:
            before = time.time()
            epoch = await log.claim("s", name="fix-ci", agent="claude")
            after = time.time()
            await log.claim("plain", agent="codex")
            first, second = log.sessions()
            assert first == known(log, "s")
            assert first[:6] == ("s", "fix-ci", "claude", epoch, 0, 1)
            assert second[:3] == ("plain", None, "codex")
            assert before <= first.created <= after
            assert first.changed == first.created
            owner = first.owner
            assert owner is not None
            assert (owner.pid, owner.is_here, owner.is_alive) == (os.getpid(), True, True)

    async def test_claim_of_existing_session_keeps_its_name_and_agent(self) -> None:
        async with self.opened() as log:
            writer = Writer(log, "s", await log.claim("s", name="fix-ci", agent="claude"), 0)
            await writer.commit(b"a", b"b")
            created = known(log).created
            # The claim ignores even a name that another session has.
            await log.claim("other", name="taken", agent="claude")
            for name in ("another", "taken", None):
                epoch = await log.claim("s", name=name, agent="codex")
                assert known(log)[:6] == ("s", "fix-ci", "claude", epoch, 2, 1)
                assert known(log).created == created
            assert ids(log) == ["s", "other"]

    @pytest.mark.parametrize("name", [None, "fix-ci"])
    async def test_claim_without_agent_refuses_missing_session(self, name: str | None) -> None:
        async with self.opened() as log:
            for agent in (None, ""):
                with pytest.raises(UsageError, match="no such session"):
                    await log.claim("s", name=name, agent=agent)
            assert log.sessions() == []
            epoch = await log.claim("s", agent="claude")
            assert await log.claim("s", name=name) > epoch
            await log.delete("s")
            # A claim of the deleted session must not create another session in its place.
            with pytest.raises(UsageError, match="no such session"):
                await log.claim("s", name=name)
            assert log.sessions() == []
            assert log.head("s").epoch == 0

    async def test_listing_shows_head_and_time_of_last_event(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"a", b"b", at=12.5)
            writer.advance()
            writer.append(b"c", at=11.0)
            writer.append(at=99.0)
            assert await writer.answers.all() == [None] * 4
            one = known(log)
            assert (one.epoch, one.seq, one.first, one.changed) == (writer.epoch, 3, 1, 11.0)
            assert log.head("s") == (one.epoch, one.seq, one.first)

    async def test_find_prefers_id_over_name(self) -> None:
        async with self.opened() as log:
            await log.claim("one", name="two", agent="claude")
            await log.claim("two", name="three", agent="claude")
            assert known(log, "one").id == "one"
            assert known(log, "two").id == "two"
            assert known(log, "three").id == "two"
            assert log.find("four") is None
            await log.delete("two")
            assert known(log, "two").id == "one"
            assert log.find("three") is None

    async def test_released_session_shows_no_owner(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.release()
            await until(lambda: known(log).owner is None)
            await log.claim("s", agent="claude")
            assert known(log).owner is not None

    # Names.

    async def test_claim_raises_name_taken_with_the_holding_session(self) -> None:
        async with self.opened() as log:
            await log.claim("one", name="fix-ci", agent="claude")
            with pytest.raises(NameTaken) as raised:
                await log.claim("two", name="fix-ci", agent="claude")
            assert raised.value.ids["session"] == "one"
            # The refused session does not exist.
            assert ids(log) == ["one"]
            assert log.head("two").epoch == 0
            await log.claim("two", name="fix-cd", agent="claude")
            for session in ("three", "four"):
                await log.claim(session, agent="claude")  # Any number of sessions can have no name.

    async def test_name_is_freed_by_delete_but_not_by_release(self) -> None:
        async with self.opened() as log:
            log.release("one", await log.claim("one", name="fix-ci", agent="claude"))
            with pytest.raises(NameTaken):
                await log.claim("two", name="fix-ci", agent="claude")
            await log.delete("one")
            await log.claim("two", name="fix-ci", agent="claude")
            assert known(log, "fix-ci").id == "two"

    async def test_concurrent_claims_of_one_name_have_one_winner(self) -> None:
        async with self.opened() as log:
            got = await outcomes(*[log.claim(f"s{number}", name="fix-ci", agent="claude") for number in range(10)])
            assert [type(one) for one in got if not isinstance(one, int)] == [NameTaken] * 9
            assert len(log.sessions()) == 1

    async def test_rename_succeeds_when_expected_name_matches(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await log.rename("s", "a", expected=None)
            assert known(log, "a").id == "s"
            await log.rename("s", "b", expected="a")
            assert known(log, "b").id == "s"
            assert log.find("a") is None
            await log.rename("s", "b", expected="b")
            assert known(log).name == "b"
            await log.rename("s", None, expected="b")
            assert known(log).name is None
            assert log.find("b") is None
            # A rename does not depend on ownership: the owner notices nothing, and a session without an owner can be
            # renamed too.
            await writer.commit(b"a")
            writer.release()
            await log.rename("s", "c", expected=None)
            assert known(log, "c").seq == 1

    async def test_rename_changes_nothing_when_expected_name_is_stale(self) -> None:
        async with self.opened() as log:
            await log.claim("one", name="a", agent="claude")
            await log.claim("two", name="b", agent="claude")
            for session, name, expected in [
                ("one", "c", "b"),
                ("one", "c", None),
                ("one", None, None),
                ("one", "a", "c"),
                ("unknown", "c", None),
                # The name is taken too, but the check of the expected name comes first.
                ("one", "b", "c"),
            ]:
                with pytest.raises(UsageError):
                    await log.rename(session, name, expected=expected)
            assert [(one.id, one.name) for one in log.sessions()] == [("one", "a"), ("two", "b")]

    async def test_rename_refuses_name_of_another_session(self) -> None:
        async with self.opened() as log:
            await log.claim("one", name="a", agent="claude")
            await log.claim("two", agent="claude")
            with pytest.raises(NameTaken) as raised:
                await log.rename("two", "a", expected=None)
            assert raised.value.ids["session"] == "one"
            assert [(one.id, one.name) for one in log.sessions()] == [("one", "a"), ("two", None)]
            await log.rename("one", "b", expected="a")
            await log.rename("two", "a", expected=None)
            got = await outcomes(*[log.rename("one", f"n{number}", expected="b") for number in range(5)])
            assert sorted(type(one).__name__ for one in got) == ["NoneType", *["UsageError"] * 4]
            assert known(log, "one").name == f"n{got.index(None)}"

    # Restoring.

    async def test_restored_session_is_complete_and_has_no_owner(self) -> None:
        async with self.opened() as log:
            history = [
                chunk(1, b"a", b"b", epoch=2, at=12.5),
                chunk(3, b"c", epoch=2),
                chunk(4, b"d", epoch=7, at=99.0),
            ]
            await log.restore("s", name="fix-ci", agent="claude", chunks=lambda: history)
            one = known(log, "fix-ci")
            assert one[:7] == ("s", "fix-ci", "claude", 7, 4, 1, None)
            assert one.changed == 99.0
            assert log.head("s") == Head(epoch=7, seq=4, first=1)
            assert [(event.epoch, event.at, event.data) for event in await everything(log)] == [
                (2, 12.5, b"a"),
                (2, 12.5, b"b"),
                (2, AT, b"c"),
                (7, 99.0, b"d"),
            ]
            assert await log.snapshot("s") is None
            answers = Answers()
            log.append("s", 7, 4, AT, lines(b"x"), answers.done())
            assert await answers.all() == [NotOwner]
            writer = await Writer.claim(log)
            assert writer.epoch > 7
            await writer.commit(b"e")
            assert data(await everything(log)) == [b"a", b"b", b"c", b"d", b"e"]
            assert data([one.event for one in await everything_placed(log)]) == [b"a", b"b", b"c", b"d", b"e"]

    @pytest.mark.parametrize("seq", [4, 5, 7])
    async def test_restored_snapshot_is_kept_and_bounds_trim(self, seq: int) -> None:
        async with self.opened() as log:
            history = [chunk(5, b"e"), chunk(6, b"f", b"g")]
            snapshot = Snapshot(seq, b"what it was")
            await log.restore("s", name=None, agent="", chunks=lambda: history, snapshot=snapshot)
            assert await log.snapshot("s") == snapshot
            assert await log.trim("s", 7) == (5 if seq == 4 else 6)

    @pytest.mark.parametrize("seq", [3, 8])
    async def test_restore_refuses_snapshot_outside_its_events(self, seq: int) -> None:
        async with self.opened() as log:
            history = [chunk(5, b"e"), chunk(6, b"f", b"g")]
            with pytest.raises(UsageError):
                await log.restore("s", name=None, agent="", chunks=lambda: history, snapshot=Snapshot(seq, b"x"))
            assert log.sessions() == []
            assert await log.snapshot("s") is None

    async def test_restored_history_may_begin_past_seq_one(self) -> None:
        async with self.opened() as log:
            await log.restore("s", name=None, agent="", chunks=lambda: iter([chunk(5, b"e"), chunk(6, b"f", b"g")]))
            assert log.head("s") == Head(epoch=1, seq=7, first=5)
            page = await log.read("s", 0)
            assert page.gap == (1, 4)
            assert data(page.events) == [b"e", b"f", b"g"]
            writer = await Writer.claim(log)
            assert writer.seq == 7
            await writer.commit(b"h")

    async def test_restore_wakes_waiting_readers(self) -> None:
        async with self.opened() as log:
            position = (await log.read_many(None)).position
            waits = [
                asyncio.ensure_future(log.wait_past("s", 2)),
                asyncio.ensure_future(log.wait_past_position(position)),
            ]
            await asyncio.sleep(0)
            await log.restore("s", name=None, agent="", chunks=lambda: [chunk(1, b"a", b"b", b"c")])
            await asyncio.gather(*waits)

    @pytest.mark.parametrize(
        "history",
        [
            [],
            [chunk(1, b"a"), chunk(3, b"c")],
            [chunk(1, b"a", b"b"), chunk(2, b"b")],
            [chunk(1, b"a"), chunk(1, b"a")],
            [chunk(2, b"b"), chunk(1, b"a")],
            [chunk(0, b"a")],
            [chunk(1, b"a", epoch=3), chunk(2, b"b", epoch=2)],
            [chunk(1, b"a", epoch=NUMBER_MAX + 1)],
            [chunk(1, b"a"), chunk(2, b"b", epoch=1 << 64)],
            [chunk(NUMBER_MAX, b"a", b"b")],
            [chunk(1 << 64, b"a")],
        ],
        ids=[
            "none",
            "hole",
            "overlap",
            "twice",
            "backwards",
            "before the first",
            "epochs fall",
            "epoch too high",
            "epoch far too high",
            "seq too high",
            "seq far too high",
        ],
    )
    async def test_restore_refuses_malformed_history(self, history: list[Chunk]) -> None:
        async with self.opened() as log:
            with pytest.raises(UsageError):
                await log.restore("s", name="fix-ci", agent="", chunks=lambda: iter(history))
            await self.check_nothing_was_left(log)

    async def test_restore_of_highest_numbers_leaves_room_for_more_events(self) -> None:
        """The session can also be deleted. After that every new session of the store begins past its epoch."""
        async with self.opened() as log:
            history = [chunk(NUMBER_MAX - 1, b"a", b"b", epoch=NUMBER_MAX)]
            await log.restore("s", name=None, agent="", chunks=lambda: history)
            writer = await Writer.claim(log)
            await writer.commit(b"c")
            assert log.head("s") == Head(writer.epoch, NUMBER_MAX + 1, NUMBER_MAX - 1)
            assert data((await log.read("s", NUMBER_MAX)).events) == [b"c"]
            await log.delete("s")
            other = await Writer.claim(log, "other")
            assert other.epoch > writer.epoch
            await other.commit(b"d")

    async def test_restore_propagates_error_from_chunks_and_leaves_nothing(self) -> None:
        async with self.opened() as log:

            def chunks() -> Iterator[Chunk]:
                yield chunk(1, b"a")
                yield chunk(2, b"b")
                raise ZeroDivisionError

            def broken() -> Iterator[Chunk]:
                raise ZeroDivisionError

            for call in (chunks, broken):
                with pytest.raises(ZeroDivisionError):
                    await log.restore("s", name="fix-ci", agent="", chunks=call)
                await self.check_nothing_was_left(log)

    async def check_nothing_was_left(self, log: Log) -> None:
        assert log.sessions() == []
        assert log.head("s") == Head(epoch=0, seq=0, first=1)
        assert await log.read("s", 0) == ((), None)
        assert await everything_placed(log) == []
        # The name is free too.
        await log.claim("other", name="fix-ci", agent="claude")
        await log.delete("other")

    async def test_restore_refuses_existing_session_or_name(self) -> None:
        async with self.opened() as log:
            await log.claim("s", name="fix-ci", agent="claude")
            with pytest.raises(UsageError):
                await log.restore("s", name="another", agent="", chunks=lambda: [chunk(1, b"x")])
            with pytest.raises(NameTaken) as raised:
                await log.restore("other", name="fix-ci", agent="", chunks=lambda: [chunk(1, b"x")])
            assert raised.value.ids["session"] == "s"
            assert ids(log) == ["s"]
            assert known(log).seq == 0
            await log.restore("other", name="another", agent="", chunks=lambda: [chunk(1, b"x")])
            with pytest.raises(UsageError):
                await log.restore("other", name="another", agent="", chunks=lambda: [chunk(1, b"x")])
            assert sorted(ids(log)) == ["other", "s"]

    async def test_concurrent_restores_of_one_session_have_one_winner(self) -> None:
        async with self.opened() as log:
            calls = [
                log.restore("s", name=None, agent="", chunks=lambda: [chunk(1, b"x"), chunk(2, b"y")]) for _ in range(5)
            ]
            got = await outcomes(*calls)
            assert sorted(type(one).__name__ for one in got) == ["NoneType", *["UsageError"] * 4]
            assert data(await everything(log)) == [b"x", b"y"]

    async def test_epoch_is_never_reused_after_delete_and_restore(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            for _ in range(5):
                old.advance()
            await old.commit(b"a")
            await log.delete("s")
            await log.restore("s", name=None, agent="", chunks=lambda: [chunk(1, b"a", epoch=1)])
            new = await Writer.claim(log)
            assert new.epoch > old.epoch
            old.append(b"x", seq=1)
            assert await old.answers.last() is not None
            await new.commit(b"b")
