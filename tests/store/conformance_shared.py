"""Several handles on one store, in one process or in many. Part of the suite in `conformance`.

The suite is for engines whose store can be opened more than once. Calls that do not wait (`head`, `find`, `sessions`)
may show an older state after a change by another handle, so the tests poll them. Awaited calls see everything that was
answered before, on any handle.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tests.store.kit import (
    AT,
    Answers,
    Writer,
    chunk,
    data,
    everything,
    everything_placed,
    follow,
    follow_all,
    is_free,
    known,
    lines,
    outcomes,
    until,
)

from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
from banksman.store.log import Log
from banksman.store.log_values import Head

RACES = 50


class SharedLogConformance:
    """Subclass it as `Test…` and implement `open_pair`, which opens two handles on one new store."""

    async def open_pair(self) -> tuple[Log, Log]:
        raise NotImplementedError

    @asynccontextmanager
    async def pair(self) -> AsyncGenerator[tuple[Log, Log]]:
        here, there = await self.open_pair()
        try:
            yield here, there
        finally:
            await asyncio.gather(here.close(), there.close())

    # Ownership.

    async def test_claim_of_live_hosts_session_raises_not_owner_with_the_owner(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(here)
            await writer.commit(b"a")
            for _ in range(2):
                with pytest.raises(NotOwner) as raised:
                    await there.claim("s", agent="claude")
                owner = known(there).owner
                assert owner is not None
                assert (raised.value.ids["pid"], raised.value.ids["address"]) == (owner.pid, owner.address)
                assert owner.pid == os.getpid()
            await until(lambda: there.head("s") == Head(epoch=writer.epoch, seq=1, first=1))
            await writer.commit(b"b")  # The owner is not affected.

    async def test_owner_is_visible_from_every_handle(self) -> None:
        async with self.pair() as (here, there):
            epoch = await here.claim("s", name="fix-ci", agent="claude")
            await until(lambda: there.find("fix-ci") is not None)
            mine, theirs = known(here), known(there, "fix-ci")
            assert mine.owner is not None
            assert theirs.owner is not None
            assert (mine.owner.is_here, mine.owner.is_alive) == (True, True)
            assert (theirs.owner.is_here, theirs.owner.is_alive) == (False, True)
            assert mine._replace(owner=None) == theirs._replace(owner=None)
            here.release("s", epoch)
            await until(lambda: is_free(there, epoch))

    @pytest.mark.parametrize("how", ["release", "close"])
    async def test_released_session_is_granted_to_other_host_and_old_writer_refused(self, how: str) -> None:
        async with self.pair() as (here, there):
            old = await Writer.claim(here)
            old.append(b"a")
            old.append(b"b", snapshot=b"at 2")
            if how == "close":
                await here.close()
            else:
                await old.answers.all()
                old.release()
                await until(lambda: is_free(there, old.epoch))
            new = await Writer.claim(there)
            assert new.epoch > old.epoch
            assert new.seq == 2
            assert await there.snapshot("s") == (2, b"at 2")
            old.append(b"late")
            assert await old.answers.all() == [None, None, StoreError if how == "close" else NotOwner]
            await new.commit(b"c")
            assert data(await everything(there)) == [b"a", b"b", b"c"]

    async def test_former_owner_on_other_host_changes_nothing(self) -> None:
        """Scenario 51: the former owner writes later."""
        async with self.pair() as (here, there):
            old = await Writer.claim(here)
            await old.commit(b"a", snapshot=b"at 1")
            old.release()
            await until(lambda: is_free(there, old.epoch))
            new = await Writer.claim(there)
            assert await new.take("claude:x") is None
            answers = Answers()
            # Under its own epoch, under the epoch of an advance, and under the new owner's epoch.
            for epoch in (old.epoch, old.epoch + 1, new.epoch):
                here.append("s", epoch, 1, AT, lines(b"late"), answers.done(), b"late")
                here.append("s", epoch, 1, AT, (), answers.done(), b"late")
                here.lease("s", epoch, None, answers.done())
                here.lease("s", epoch, "claude:y", answers.done())
                here.release("s", epoch)
                here.advance("s", epoch, answers.done())
            assert await answers.all() == [NotOwner] * 15
            await new.commit(b"b")
            await until(lambda: here.head("s") == Head(epoch=new.epoch, seq=2, first=1))
            assert data(await everything(here)) == [b"a", b"b"]
            assert await there.snapshot("s") == (1, b"at 1")
            owner = known(there).owner
            assert owner is not None
            assert owner.is_here
            other = await Writer.claim(here, "other")
            assert isinstance(await other.take("claude:x"), NotOwner)
            assert await other.take("claude:y") is None

    async def test_concurrent_claims_of_one_session_have_one_winning_host(self) -> None:
        async with self.pair() as (here, there):
            calls = [(here if number % 2 else there).claim("s", agent="claude") for number in range(RACES)]
            got = await outcomes(*calls)
            winners = {number % 2 for number, one in enumerate(got) if isinstance(one, int)}
            assert len(winners) == 1, got
            epochs = [one for one in got if isinstance(one, int)]
            assert len(epochs) == len(set(epochs)) == RACES // 2
            assert [type(one) for one in got if not isinstance(one, int)] == [NotOwner] * (RACES // 2)
            winner = here if winners == {1} else there
            epoch = max(epochs)
            await until(lambda: here.head("s") == there.head("s") == Head(epoch=epoch, seq=0, first=1))
            await Writer(winner, "s", epoch, 0).commit(b"a")

    async def test_concurrent_claims_of_many_sessions_have_one_winner_each(self) -> None:
        async with self.pair() as (here, there):
            names = [f"s{number}" for number in range(RACES)]
            mine, theirs = await asyncio.gather(
                outcomes(*[here.claim(name, agent="claude") for name in names]),
                outcomes(*[there.claim(name, agent="claude") for name in names]),
            )
            for name, one, other in zip(names, mine, theirs, strict=True):
                assert isinstance(one, int) != isinstance(other, int), (name, one, other)
                owner = known(here if isinstance(one, int) else there, name).owner
                assert owner is not None
                assert owner.is_here

    async def test_epoch_is_never_reused_when_session_moves_back_and_forth(self) -> None:
        async with self.pair() as (here, there):
            epochs: list[int] = []
            for number in range(10):
                log, other = (here, there) if number % 2 else (there, here)
                writer = await Writer.claim(log)
                assert writer.seq == number
                writer.append(b"%d" % number)
                epochs.append(writer.epoch)
                writer.release()
                assert await writer.answers.all() == [None]
                await until(lambda other=other, epoch=writer.epoch: is_free(other, epoch))
            assert epochs == sorted(set(epochs))
            assert data(await everything(here)) == data(await everything(there)) == [b"%d" % one for one in range(10)]

    # Leases.

    @pytest.mark.parametrize("how", ["lease", "release", "close", "delete"])
    async def test_lease_holds_across_hosts_until_given_back(self, how: str) -> None:
        async with self.pair() as (here, there):
            one, two = await Writer.claim(here, "one"), await Writer.claim(there, "two")
            assert await one.take("claude:x") is None
            refusal = await two.take("claude:x")
            assert isinstance(refusal, NotOwner)
            assert refusal.ids["session"] == "one"
            match how:
                case "lease":
                    assert await one.take("claude:y") is None
                case "release":
                    one.release()
                    await until(lambda: is_free(there, one.epoch, "one"))
                case "delete":
                    await here.delete("one")
                case _:
                    await here.close()
            assert await two.take("claude:x") is None

    async def test_concurrent_leases_of_one_key_have_one_winner(self) -> None:
        async with self.pair() as (here, there):
            writers = [await Writer.claim((here, there)[number % 2], f"s{number}") for number in range(10)]
            for turn in range(5):
                for writer in writers:
                    writer.lease(f"claude:{turn}")
                refusals = [await writer.answers.last() for writer in writers]
                winners = [writer for writer, one in zip(writers, refusals, strict=True) if one is None]
                assert len(winners) == 1
                named = {one.ids["session"] for one in refusals if one is not None}
                assert named == {winners[0].session}
                assert await winners[0].take(None) is None

    # Reading.

    async def test_reader_is_woken_by_commit_of_another_host(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(here)
            reader = asyncio.ensure_future(follow(there, 20))
            early = asyncio.ensure_future(there.wait_past("not claimed yet", 0))
            for number in range(20):
                await writer.commit(b"%d" % number)
            assert data(await reader) == [b"%d" % number for number in range(20)]
            await (await Writer.claim(here, "not claimed yet")).commit(b"a")
            await early

    async def test_wait_past_sees_other_hosts_commit_when_session_is_then_claimed_here(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(here)
            for _ in range(5):
                wait = asyncio.ensure_future(there.wait_past("s", writer.seq))
                await asyncio.sleep(0)
                await writer.commit(b"a")
                writer.release()
                await until(lambda epoch=writer.epoch: is_free(there, epoch))
                epoch = await there.claim("s")
                async with asyncio.timeout(10):
                    await wait
                there.release("s", epoch)
                await until(lambda epoch=epoch: is_free(here, epoch))
                writer = await Writer.claim(here)

    async def test_read_many_reader_is_woken_by_commit_of_another_host(self) -> None:
        async with self.pair() as (here, there):
            readers = [asyncio.ensure_future(follow_all(log, 40)) for log in (here, there)]
            mine, theirs = await Writer.claim(here, "mine"), await Writer.claim(there, "theirs")
            for number in range(20):
                await mine.commit(b"%d" % number)
                await theirs.commit(b"%d" % number)
            one, other = [await reader for reader in readers]
            assert one == other
            assert [(event.session, event.seq) for event in one] == [
                (session, seq) for seq in range(1, 21) for session in ("mine", "theirs")
            ]

    async def test_position_is_valid_for_every_host(self) -> None:
        async with self.pair() as (here, there):
            writers = [await Writer.claim((here, there)[number % 2], f"s{number}") for number in range(6)]
            for number in range(60):
                writers[number % 6].append(*[b"%d" % number] * (1 + number % 3))
            for writer in writers:
                assert set(await writer.answers.all()) == {None}
            placed = await everything_placed(here)
            assert len(placed) == 120
            assert placed == await everything_placed(there, limit=7)
            for index, (position, _) in enumerate(placed):
                assert await everything_placed(there, position, 50) == placed[index + 1 :]

    async def test_trim_by_one_host_is_seen_by_the_other(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(here)
            for number in range(4):
                await writer.commit(b"%d" % number, snapshot=b"so far")
            # A trim does not depend on ownership.
            assert await there.trim("s", 3) == 3
            await until(lambda: here.head("s").first == 3)
            assert (await here.read("s", 0)).gap == (1, 2)
            assert dict((await here.read_many(None)).gaps) == {"s": 2}
            await writer.commit(b"4")

    # Names.

    async def test_name_is_unique_across_hosts(self) -> None:
        async with self.pair() as (here, there):
            await here.claim("one", name="fix-ci", agent="claude")
            with pytest.raises(NameTaken) as raised:
                await there.claim("two", name="fix-ci", agent="claude")
            assert raised.value.ids["session"] == "one"
            await there.claim("two", agent="claude")
            with pytest.raises(NameTaken):
                await there.rename("two", "fix-ci", expected=None)
            with pytest.raises(NameTaken):
                await there.restore("three", name="fix-ci", agent="", chunks=lambda: [chunk(1, b"x")])
            shown = [("one", "fix-ci"), ("two", None)]
            await until(lambda: [(one.id, one.name) for one in here.sessions()] == shown)

    async def test_concurrent_claims_of_one_name_across_hosts_have_one_winner(self) -> None:
        async with self.pair() as (here, there):
            calls = [
                (here, there)[number % 2].claim(f"s{number}", name="fix-ci", agent="claude") for number in range(RACES)
            ]
            got = await outcomes(*calls)
            assert [type(one) for one in got if not isinstance(one, int)] == [NameTaken] * (RACES - 1)
            await until(lambda: len(here.sessions()) == len(there.sessions()) == 1)

    async def test_concurrent_renames_from_one_name_have_one_winner(self) -> None:
        async with self.pair() as (here, there):
            await here.claim("s", name="before", agent="claude")
            calls = [(here, there)[number % 2].rename("s", f"n{number}", expected="before") for number in range(20)]
            got = await outcomes(*calls)
            assert sorted(type(one).__name__ for one in got) == ["NoneType", *["UsageError"] * 19]
            await until(lambda: known(here).name == known(there).name == f"n{got.index(None)}")
            # Every rename that expects the old name is refused, whatever its new name is.
            for name in ("before", None, "after"):
                with pytest.raises(UsageError):
                    await there.rename("s", name, expected="before")

    # Deleting and restoring.

    async def test_delete_of_live_hosts_session_is_refused(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(here)
            await writer.commit(b"a")
            with pytest.raises(NotOwner) as raised:
                await there.delete("s")
            assert raised.value.ids["pid"] == os.getpid()
            await writer.commit(b"b")
            assert len(await everything(there)) == 2
            writer.release()
            await until(lambda: is_free(there, writer.epoch))
            await there.delete("s")
            await until(lambda: here.find("s") is None)
            assert here.head("s") == Head(epoch=0, seq=0, first=1)
            assert await everything_placed(here) == []
            again = await Writer.claim(here)
            assert again.epoch > writer.epoch
            assert again.seq == 0
            await again.commit(b"new")
            assert data(await everything(there)) == [b"new"]

    async def test_restore_refuses_session_made_by_another_host(self) -> None:
        async with self.pair() as (here, there):
            await here.claim("s", agent="claude")
            with pytest.raises(UsageError):
                await there.restore("s", name=None, agent="", chunks=lambda: [chunk(1, b"x")])
            got = await outcomes(
                *[log.restore("t", name=None, agent="", chunks=lambda: [chunk(1, b"x")]) for log in (here, there) * 5]
            )
            assert sorted(type(one).__name__ for one in got) == ["NoneType", *["UsageError"] * 9]
            assert data(await everything(here, "t")) == [b"x"]

    async def test_close_of_one_handle_leaves_the_other_alone(self) -> None:
        async with self.pair() as (here, there):
            writer = await Writer.claim(there)
            await (await Writer.claim(here, "other")).commit(b"x")
            wait = asyncio.ensure_future(there.wait_past("s", 0))
            await here.close()
            await writer.commit(b"a")
            await wait
            assert data(await everything(there, "other")) == [b"x"]
