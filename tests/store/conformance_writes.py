"""Writes: claims, epochs, answers, leases. Part of the suite in `conformance`."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.store.kit import AT, Answers, Opens, Refusal, Writer, data, everything, known, lines, until

from banksman.errors import NotOwner
from banksman.store.log_values import Head


class WritingConformance(Opens):
    # One writer at a time.

    async def test_unclaimed_session_has_zero_head_and_is_not_listed(self) -> None:
        async with self.opened() as log:
            assert log.head("s") == Head(epoch=0, seq=0, first=1)
            assert await log.read("s", 0) == ((), None)
            assert log.sessions() == []

    async def test_claim_raises_epoch_and_keeps_events(self) -> None:
        async with self.opened() as log:
            first = await log.claim("s", agent="claude")
            writer = await Writer.claim(log)
            await writer.commit(b"a", b"b")
            third = await log.claim("s", agent="claude")
            assert 0 < first < writer.epoch < third
            assert log.head("s") == Head(epoch=third, seq=2, first=1)
            assert [event.epoch for event in await everything(log)] == [writer.epoch] * 2

    async def test_append_under_older_epoch_is_refused(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            await old.commit(b"a")
            await log.claim("s", agent="claude")
            for what, seq in [((b"x",), 1), ((), 1), ((b"x",), 0), ((b"x", b"y"), 9)]:
                old.append(*what, seq=seq)
            assert (await old.answers.all())[1:] == [NotOwner] * 4
            assert data(await everything(log)) == [b"a"]

    async def test_append_under_unknown_epoch_is_refused(self) -> None:
        async with self.opened() as log:
            answers = Answers()
            for epoch in (0, 1):
                log.append("s", epoch, 0, AT, lines(b"x"), answers.done())
            assert await answers.all() == [NotOwner, NotOwner]
            assert log.sessions() == []
            writer = await Writer.claim(log)
            writer.append(b"x", epoch=writer.epoch + 1, seq=0)
            assert await writer.answers.all() == [NotOwner]
            assert log.head("s").seq == 0

    @pytest.mark.parametrize("expected_seq", [-1, 0, 1, 3, 4, 1 << 40])
    async def test_append_with_wrong_expected_seq_is_refused(self, expected_seq: int) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"a", b"b")
            writer.append(b"x", seq=expected_seq)
            assert await writer.answers.all() == [None, NotOwner]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_concurrent_writers_in_one_epoch_have_one_winner(self) -> None:
        async with self.opened() as log:
            one = await Writer.claim(log)
            answers = Answers()
            one.append(b"one")
            log.append("s", one.epoch, 0, AT, lines(b"two"), answers.done())
            assert await one.answers.all() + await answers.all() == [None, NotOwner]
            assert data(await everything(log)) == [b"one"]

    async def test_former_owner_changes_nothing(self) -> None:
        """Scenario 51, within one host: the former owner does not know of its loss, and makes every call it can."""
        async with self.opened() as log:
            old = await Writer.claim(log)
            await old.commit(b"a", snapshot=b"at 1")
            assert await old.take("claude:x") is None
            new = await Writer.claim(log)
            assert await new.take("claude:y") is None
            await new.commit(b"b", snapshot=b"at 2")
            owner, name = known(log).owner, known(log).name
            old.append(b"late", seq=2, snapshot=b"late")
            old.append(seq=2, snapshot=b"late")
            old.lease("claude:z")
            old.lease(None)
            old.release()
            old.advance()
            # The old writer counts its advance as done until the refusal arrives. So it uses an epoch that it never
            # had, and that no other writer may have either.
            old.append(b"late", seq=2, snapshot=b"late")
            old.lease(None)
            old.release()
            new.append(b"c")
            assert (await old.answers.all())[2:] == [NotOwner] * 7
            assert await new.answers.all() == [None, None, None]
            assert data(await everything(log)) == [b"a", b"b", b"c"]
            assert await log.snapshot("s") == (2, b"at 2")
            assert (known(log).owner, known(log).name, known(log).epoch) == (owner, name, new.epoch)
            other = await Writer.claim(log, "other")
            assert isinstance(await other.take("claude:y"), NotOwner)
            assert await other.take("claude:x") is None

    async def test_claim_commits_or_refuses_each_pending_append_whole(
        self,
    ) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            chunks = [(b"a", b"b"), (b"c",), (b"d", b"e", b"f")]
            for chunk in chunks:
                old.append(*chunk)
            new = await Writer.claim(log)  # Claims, and starts from the head of the log.
            old.append(b"late", seq=new.seq)
            new.append(b"new")
            assert await new.answers.all() == [None]
            kinds = await old.answers.all()
            committed = kinds.count(None)
            assert kinds == [None] * committed + [NotOwner] * (len(kinds) - committed)
            assert committed <= len(chunks)
            assert data(await everything(log)) == [line for chunk in chunks[:committed] for line in chunk] + [b"new"]

    # Answers.

    async def test_answer_never_comes_inside_a_call(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)  # The methods of `Writer` check that no answer comes inside the call.
            writer.append(b"a")
            writer.append()
            writer.advance()
            writer.lease("claude:x")
            writer.append(b"x", seq=77)
            writer.append(b"x", epoch=77)
            writer.lease("claude:x")
            writer.release()
            log.head("s")
            log.sessions()
            log.find("s")
            assert writer.answers.given == []
            assert len(await writer.answers.all()) == 7

    async def test_answers_come_in_order_of_appends(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for number in range(50):
                writer.append(*[b"%d" % number] * (number % 3))  # Some appends are empty: they keep their place too.
                if number % 10 == 0:
                    writer.advance()
                    writer.lease(f"claude:{number}")
            writer.append(b"x", seq=1)
            writer.append(b"x", epoch=0)
            writer.lease(None)
            writer.append(b"x")
            writer.advance()
            assert await writer.answers.all() == [None] * 60 + [NotOwner] * 5

    async def test_answered_append_is_already_committed(self) -> None:
        async with self.opened() as log:
            epoch = await log.claim("s", agent="claude")
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

    async def test_empty_append_commits_nothing_and_is_answered(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit()
            assert log.head("s") == Head(epoch=writer.epoch, seq=0, first=1)
            await writer.commit(b"a")
            await writer.commit()
            assert log.head("s").seq == 1

    async def test_appends_behind_a_failed_append_fail_too(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"a")
            writer.append(b"x", seq=5)
            writer.append(b"y")
            writer.append()
            writer.append(b"z", seq=1)  # This append would fit if the two before it had not failed.
            assert await writer.answers.all() == [None, *[NotOwner] * 4]
            assert data(await everything(log)) == [b"a"]

    async def test_append_behind_a_failed_append_fails_even_if_its_seq_fits(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            await writer.commit(b"a", b"b")
            writer.append(b"x", b"y", seq=0)
            writer.append(b"z")
            assert writer.seq == 3
            assert (await writer.answers.all())[1:] == [NotOwner, NotOwner]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_writer_may_resume_from_head_once_answered_with_failure(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            answers = Answers()
            second, third = answers.done(), answers.done()

            def again(error: Refusal) -> None:
                second(error)
                log.append("s", writer.epoch, log.head("s").seq, AT, lines(b"again"), third)

            writer.append(b"a")
            log.append("s", writer.epoch, 7, AT, lines(b"x"), again)
            assert await answers.all() == [NotOwner, None]
            assert data(await everything(log)) == [b"a", b"again"]

    async def test_stale_writer_does_not_fail_the_owners_appends(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            new = await Writer.claim(log)
            old.append(b"old")
            new.append(b"a")
            old.append(b"old")
            new.append(b"b")
            assert await old.answers.all() == [NotOwner, NotOwner]
            assert await new.answers.all() == [None, None]
            assert data(await everything(log)) == [b"a", b"b"]

    async def test_claim_clears_failure_of_the_previous_writer(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            old.append(b"x", seq=5)
            new = await Writer.claim(log)
            new.append(b"a")
            assert await old.answers.all() == [NotOwner]
            assert await new.answers.all() == [None]

    async def test_raising_callback_does_not_block_other_answers(self, caplog: pytest.LogCaptureFixture) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")

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

    async def test_append_from_inside_an_answer_is_answered_after_it(self) -> None:
        async with self.opened() as log:
            epoch = await log.claim("s", agent="claude")
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

    async def test_append_copies_the_callers_entry_list(self) -> None:
        async with self.opened() as log:
            epoch = await log.claim("s", agent="claude")
            answers = Answers()
            entries = lines(b"a", b"b")
            log.append("s", epoch, 0, AT, entries, answers.done())
            entries.clear()
            entries += lines(b"x")
            assert await answers.all() == [None]
            assert data(await everything(log)) == [b"a", b"b"]

    # Advancing the epoch.

    async def test_owner_advances_epoch_and_appends_at_once(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            epoch = writer.epoch
            writer.append(b"a")
            writer.advance()
            writer.append(b"b")
            writer.advance()
            writer.append(b"c", epoch=epoch + 1)
            assert await writer.answers.all() == [None, None, None, None, NotOwner]
            assert [(event.epoch, event.data) for event in await everything(log)] == [(epoch, b"a"), (epoch + 1, b"b")]
            assert log.head("s") == Head(epoch=epoch + 2, seq=2, first=1)
            assert await log.claim("s", agent="claude") > epoch + 2

    async def test_lease_survives_an_advance(self) -> None:
        async with self.opened() as log:
            writer, other = await Writer.claim(log), await Writer.claim(log, "other")
            writer.lease("claude:x")
            writer.advance()
            assert await writer.answers.all() == [None, None]
            assert isinstance(await other.take("claude:x"), NotOwner)

    async def test_refused_lease_does_not_fail_operations_behind_it(self) -> None:
        async with self.opened() as log:
            writer, other = await Writer.claim(log), await Writer.claim(log, "other")
            assert await other.take("claude:x") is None
            writer.lease("claude:x")
            writer.append(b"a")
            writer.advance()
            writer.append(b"b")
            assert await writer.answers.all() == [NotOwner, None, None, None]

    async def test_advance_from_foreign_epoch_is_refused(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            answers = Answers()
            for session, epoch in (("s", writer.epoch - 1), ("s", writer.epoch + 1), ("never claimed", 1)):
                log.advance(session, epoch, answers.done())
            assert await answers.all() == [NotOwner] * 3
            assert [(one.id, one.epoch) for one in log.sessions()] == [("s", writer.epoch)]
            await writer.commit(b"a")

    async def test_fenced_writer_cannot_advance_into_new_owners_epoch(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            new = await Writer.claim(log)
            old.advance()
            old.append(b"old")
            new.append(b"new")
            assert await old.answers.all() == [NotOwner, NotOwner]
            assert await new.answers.all() == [None]
            await log.delete("s")
            again = await Writer.claim(log)
            new.advance()
            new.append(b"new", seq=0)
            again.append(b"again")
            assert await new.answers.all() == [None, NotOwner, NotOwner]
            assert await again.answers.all() == [None]
            assert data(await everything(log)) == [b"again"]

    async def test_advance_behind_a_failed_append_fails_with_its_followers(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"x", seq=7)
            writer.advance()
            writer.append(b"y", seq=0)
            assert await writer.answers.all() == [NotOwner] * 3
            assert log.head("s") == Head(epoch=writer.epoch - 1, seq=0, first=1)
            # The writer knows the failure, and continues under the epoch that it has.
            writer.epoch -= 1
            writer.append(b"a", seq=0)
            assert await writer.answers.last() is None

    # Releasing.

    async def test_released_session_has_no_owner_and_refuses_writes(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"a", snapshot=b"at 1")
            writer.append(b"b")
            writer.release()
            writer.append(b"x")
            writer.append()
            writer.lease("claude:x")
            writer.advance()
            assert await writer.answers.all() == [None, None, *[NotOwner] * 4]
            await until(lambda: known(log).owner is None)
            assert log.head("s") == Head(epoch=writer.epoch - 1, seq=2, first=1)
            new = await Writer.claim(log)
            assert new.epoch >= writer.epoch
            assert new.seq == 2
            await new.commit(b"c")
            assert data(await everything(log)) == [b"a", b"b", b"c"]

    async def test_release_takes_effect_after_earlier_appends(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for number in range(20):
                writer.append(b"%d" % number)
            writer.release()
            new = await Writer.claim(log)
            assert new.seq == 20
            assert await writer.answers.all() == [None] * 20

    async def test_release_under_another_epoch_does_nothing(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            assert await writer.take("claude:x") is None
            log.release("s", writer.epoch - 1)
            log.release("s", writer.epoch + 1)
            log.release("never claimed", 1)
            await writer.commit(b"a")
            assert known(log).owner is not None
            other = await Writer.claim(log, "other")
            assert isinstance(await other.take("claude:x"), NotOwner)
            writer.release()
            writer.release()  # The session is released already.
            assert await other.take("claude:x") is None

    async def test_release_behind_a_failed_append_still_releases(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            writer.append(b"x", seq=9)
            writer.release()
            assert await writer.answers.all() == [NotOwner]
            await until(lambda: known(log).owner is None)
            new = await Writer.claim(log)
            await new.commit(b"a")

    # Leases.

    async def test_lease_has_one_holder_and_refusal_names_it(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            assert await one.take("claude:x") is None
            # A refusal changes nothing: the next call is refused again, and the holder keeps the lease and can take it
            # again.
            for _ in range(2):
                refusal = await two.take("claude:x")
                assert isinstance(refusal, NotOwner)
                assert refusal.ids["session"] == "one"
                assert "one" in str(refusal)
                assert refusal.hint
            assert await one.take("claude:x") is None
            two.append(b"a")
            assert await two.answers.last() is None

    async def test_lease_of_another_key_gives_back_the_previous_one(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            assert await one.take("claude:x") is None
            assert await one.take("claude:y") is None
            assert await two.take("claude:x") is None
            # A refused session keeps the lease that it had.
            assert isinstance(await one.take("claude:x"), NotOwner)
            assert isinstance(await two.take("claude:y"), NotOwner)
            assert isinstance(await one.take("claude:x"), NotOwner)
            assert await two.take(None) is None
            assert await one.take("claude:x") is None
            assert await two.take("claude:y") is None

    async def test_lease_give_back_without_lease_succeeds(self) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            assert await one.take("claude:x") is None
            assert await two.take(None) is None
            assert isinstance(await two.take("claude:x"), NotOwner)

    @pytest.mark.parametrize("how", ["release", "delete", "claim"])
    async def test_lease_ends_with_its_ownership(self, how: str) -> None:
        async with self.opened() as log:
            one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
            assert await one.take("claude:x") is None
            if how == "release":
                one.release()
            elif how == "delete":
                await log.delete("one")
            else:
                await log.claim("one", agent="claude")
            assert await two.take("claude:x") is None

    async def test_lease_behind_a_failed_append_fails(self) -> None:
        async with self.opened() as log:
            one = await Writer.claim(log, "one")
            assert await one.take("claude:x") is None
            one.append(b"x", seq=9)
            one.lease(None)
            assert (await one.answers.all())[1:] == [NotOwner, NotOwner]
            two = await Writer.claim(log, "two")
            assert isinstance(await two.take("claude:x"), NotOwner)

    async def test_lease_is_granted_to_the_owner_only(self) -> None:
        async with self.opened() as log:
            old = await Writer.claim(log)
            new = await Writer.claim(log)
            answers = Answers()
            log.lease("never claimed", 1, "claude:x", answers.done())
            log.lease("s", new.epoch + 1, "claude:x", answers.done())
            old.lease("claude:x")
            assert await answers.all() == [NotOwner, NotOwner]
            assert await old.answers.all() == [NotOwner]
            other = await Writer.claim(log, "other")
            assert await other.take("claude:x") is None
            await new.commit(b"a")  # The failures of the other writers do not count for this one.
